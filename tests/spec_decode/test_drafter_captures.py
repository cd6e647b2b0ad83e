import pytest
import torch

from attn_backends import get
from spec_decode.drafter import Strategy, default_capture_sizes
from tests.spec_decode.drafter_backends import Bound
from tests.spec_decode.drafter_scene import CAPTURING, CONTEXTS, MAX_SEQ_LEN, Scene, assert_same, decode_only, strong


@pytest.mark.parametrize("rounds", [0, 1])
@pytest.mark.parametrize("strategy", CAPTURING)
@pytest.mark.parametrize("scene", [strong, decode_only])
def test_a_capture_touches_nothing_of_a_live_request(scene, strategy, rounds):
    scene = scene(strategy=strategy)
    scene.rounds(rounds)
    tables = scene.tables
    live = [*scene.caches(), tables.block_tables, tables.token_limits, tables.overflow]
    before = [tensor.clone() for tensor in live]
    scene.drafter.capture()
    assert all(torch.equal(a, b) for a, b in zip(before, live, strict=True))


def test_a_capture_ahead_of_the_first_round_changes_no_token():
    scene = strong()
    scene.drafter.capture()
    assert_same(scene.rounds(), strong().rounds())


def test_a_capture_between_rounds_changes_no_token():
    scene, expected = strong(), strong().rounds(2)
    verified = [scene.verified(round_=0)]
    contexts = [c + int(a) + 1 for c, a in zip(CONTEXTS, verified[0].accepted, strict=True)]
    verified.append(scene.verified(round_=1, contexts=contexts))
    found = []
    for each in verified:
        drafts = scene.drafter.propose(each)
        found.append((drafts.tokens.clone(), drafts.logits.clone()))
        scene.drafter.graphs.release()
        scene.drafter.capture()
    assert_same(found, expected)


def test_a_drafter_whose_graphs_were_released_captures_them_for_its_next_round():
    scene, expected = strong(capture_sizes=[4]), strong(capture_sizes=[4]).rounds(2)
    found, contexts = [], list(CONTEXTS)
    for round_ in range(2):
        verified = scene.verified(round_=round_, contexts=contexts)
        drafts = scene.drafter.propose(verified)
        found.append((drafts.tokens.clone(), drafts.logits.clone()))
        contexts = [c + int(a) + 1 for c, a in zip(contexts, verified.accepted, strict=True)]
        scene.drafter.graphs.release()
    assert_same(found, expected)


def test_an_eager_drafter_captures_nothing():
    scene = strong(strategy=Strategy.EAGER)
    scene.drafter.capture()
    assert scene.drafter.graphs.reports == []


def test_an_eager_drafter_needs_no_capture_size():
    strong(capture_sizes=[2], strategy=Strategy.EAGER).rounds(1)


def test_a_builder_gets_one_upper_bound_per_row_at_capture_too():
    Scene([Bound(), get("torch_reference")]).drafter.capture()


@pytest.mark.parametrize(("max_reqs", "sizes"), [(1, [1]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])])
def test_capture_sizes_are_powers_of_two_up_to_the_most(max_reqs, sizes):
    assert default_capture_sizes(max_reqs) == sizes


@pytest.mark.parametrize("strategy", CAPTURING)
def test_two_tokens_a_round_are_drafted_at_every_capture_size(strategy):
    found = strong(steps=2, strategy=strategy, limits=(MAX_SEQ_LEN,) * 4, capture_sizes=[1, 2, 3, 4])
    expected = strong(steps=2, strategy=Strategy.EAGER, limits=(MAX_SEQ_LEN,) * 4, capture_sizes=[1, 2, 3, 4])
    for count in (4, 3, 2, 1):
        tokens = []
        for scene in (found, expected):
            scene.load(range(count))
            verified = scene.verified(round_=count, contexts=[3, 7, 15, 0][:count])
            tokens.append(scene.drafter.propose(verified).tokens.tolist())
        assert tokens[0] == tokens[1]


@pytest.mark.parametrize("strategy", CAPTURING)
def test_sizes_left_out_for_want_of_memory_are_served_by_the_next_larger(strategy):
    whole = strong(strategy=strategy)
    whole.drafter.capture()
    largest = sum(report.bytes for report in whole.drafter.graphs.reports if report.key.num_reqs == 4)
    scene = strong(strategy=strategy, graph_memory_limit=largest + 1)
    scene.load([0])
    wanted = strong(strategy=Strategy.EAGER, capture_sizes=[4])
    wanted.load([0])
    tokens = [s.drafter.propose(s.verified(rows=slice(0, 1))).tokens.tolist() for s in (scene, wanted)]
    assert set(scene.drafter.graphs.left_out) == {1, 2} and tokens[0] == tokens[1]
