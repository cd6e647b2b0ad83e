"""Modules of multi-token prediction that draft a token each, against their chain over whole true texts in fp64."""

from functools import partial
from itertools import pairwise

import pytest
import torch

from attn_backends import get
from builders import BatchError, RequestTables
from spec_decode.drafter import Drafter, DrafterConfig, Strategy, StrategyError
from spec_decode.models import CheckpointError, mtp
from spec_decode.models.checkpoints.store import TensorStore
from spec_decode.models.load import load_draft
from spec_decode.models.mtp_draft import MtpModules
from spec_decode.paged.kv_groups import make_group
from tests.factories import CPU, owned_pages
from tests.spec_decode.models.generated_mtp import (
    GLM_CONFIG,
    V3_CONFIG,
    DraftFixture,
    StubTarget,
    close,
    v3_modules,
    v3_tensors,
    write,
)
from tests.spec_decode.models.mtp_oracle import MtpOracle

COUNT = 3
TARGET = StubTarget()
V3, GLM = ({**config, "num_nextn_predict_layers": COUNT} for config in (V3_CONFIG, GLM_CONFIG))
FORMS = {"deepseek_v3": (V3, False), "glm_flash": (GLM, False), "embedding_and_head_of_the_target": (GLM, True)}
GRAPHS = [Strategy.FULL_LOOP, Strategy.PER_STEP]


def load(folder):
    return mtp.load(TensorStore.open(folder), TARGET, dtype=torch.float32, device=CPU)


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def form(request, tmp_path):
    config, shared = request.param
    tensors = v3_modules(config, shared=shared)
    return load(write(tmp_path, config, tensors)), [MtpOracle(config, tensors, TARGET, k) for k in range(COUNT)]


@pytest.fixture
def model(tmp_path):
    return load(write(tmp_path, V3, v3_modules(V3)))


class RoundsFixture(DraftFixture):
    """Rounds of which most reject what was drafted, after prompts that come in parts; what was never read is NaN."""

    ACCEPTED = ((1, 3), (0, 0), (3, 2), (0, 0), (2, 1))
    STEPS = COUNT

    def __init__(self, model, backend="torch_reference", *, contexts=(5, 9), part=99, steps=COUNT):
        super().__init__(model, backend)
        self.CONTEXTS, self.STEPS, self.part = contexts, steps, part

    def prefill(self):
        self.drafter._step.inputs_read.states.fill_(torch.nan)
        pages = owned_pages(2, 12, 24)
        tables = RequestTables(page_sizes=[4], num_pages=[24], max_reqs=2, max_seq_len=48, device=CPU)
        for start in range(0, max(self.CONTEXTS), self.part):
            ends = [min(start + self.part, length) for length in self.CONTEXTS]
            rows = [row for row in range(2) if ends[row] > start]
            tables.load([[pages[row] for row in rows]], [ends[row] for row in rows])
            ids, hidden = (
                torch.cat([self.committed[row][which][start : ends[row]] for row in rows]) for which in (0, 1)
            )
            lens = [ends[row] for row in rows]
            self.drafter.prefill(tables, [end - start for end in lens], lens, ids, hidden)


def chained_drafts(oracles, ids, hidden):
    """A greedy token of each module after a whole text, and their logits."""
    tokens, logits = [], []
    for oracle in oracles:
        hidden = oracle.states(ids, hidden)
        logits.append(oracle.logits(hidden[-1:])[0])
        tokens.append(int(logits[-1].argmax()))
        ids = torch.cat([ids[1:], torch.tensor(tokens[-1:])])
    return tokens, logits


def assert_drafts_are_those_of_the_chain(fixture, oracles, strategy=Strategy.EAGER):
    found = fixture.drafts(strategy)
    wanted = fixture.dense_drafts(partial(chained_drafts, oracles[: fixture.STEPS]))
    for round_, ((tokens, logits), (wanted_tokens, wanted_logits)) in enumerate(zip(found, wanted, strict=True)):
        assert tokens.tolist() == wanted_tokens, f"round {round_}"
        close(logits, wanted_logits)


@pytest.mark.parametrize("backend", ["torch_reference", "triton_mla"])
def test_each_module_drafts_what_it_says_after_the_whole_true_text(form, backend):
    model, oracles = form
    assert_drafts_are_those_of_the_chain(RoundsFixture(model, backend), oracles)


@pytest.mark.parametrize("contexts", [(0, 1), (2, 3), (0, 9)])
def test_texts_shorter_than_the_chain_draft_the_same(form, contexts):
    model, oracles = form
    assert_drafts_are_those_of_the_chain(RoundsFixture(model, contexts=contexts), oracles, Strategy.FULL_LOOP)


def test_what_was_never_read_reaches_no_cache(model):
    fixture = RoundsFixture(model, contexts=(0, 1))
    fixture.ACCEPTED = ((1, 0),)
    fixture.drafts(Strategy.EAGER)
    written = [page * 4 + offset for row in owned_pages(2, 12, 24) for page in row[:2] for offset in range(4)][
        : 2 * COUNT
    ]
    for cache in fixture.groups[0].caches.values():
        assert cache.key.flatten(0, 1)[written].isfinite().all()


@pytest.mark.parametrize("part", [1, 2, 4])
def test_a_prompt_in_parts_fills_every_modules_cache(form, part):
    model, oracles = form
    assert_drafts_are_those_of_the_chain(RoundsFixture(model, part=part), oracles)


@pytest.mark.parametrize("steps", [1, 2])
def test_fewer_tokens_than_modules_are_drafted_by_the_first(form, steps):
    model, oracles = form
    fixture = RoundsFixture(model, steps=steps)
    fixture.ACCEPTED = tuple((min(a, steps), min(b, steps)) for a, b in fixture.ACCEPTED)
    assert_drafts_are_those_of_the_chain(fixture, oracles)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("backend", ["torch_reference", "triton_mla"])
@pytest.mark.parametrize("strategy", GRAPHS)
def test_one_graph_drafts_what_eager_drafts_to_the_last_bit(model, strategy, backend, temperature):
    expected = RoundsFixture(model, backend).drafts(Strategy.EAGER, temperature)
    fixture = RoundsFixture(model, backend)
    for (tokens, logits), (wanted, wanted_logits) in zip(fixture.drafts(strategy, temperature), expected, strict=True):
        assert tokens.tolist() == wanted.tolist() and torch.equal(logits, wanted_logits)
    assert {report.key.kind for report in fixture.drafter.graphs.reports} == {"extend"}


def test_a_round_that_is_run_again_drafts_the_same(model):
    fixture = RoundsFixture(model)
    *_, (tokens, logits) = fixture.drafts(Strategy.FULL_LOOP)
    again = fixture.drafter.propose(fixture.rounds[-1])
    assert torch.equal(again.tokens, tokens) and torch.equal(again.logits, logits)


def test_rows_stop_where_they_are_told_and_the_others_draft_on(model):
    fixture = RoundsFixture(model)
    *_, (tokens, _) = fixture.drafts(Strategy.FULL_LOOP)
    lens = fixture.rounds[-1]._replace(draft_lens=torch.tensor([1, COUNT], dtype=torch.int32))
    assert fixture.drafter.propose(lens).tokens.tolist() == [[int(tokens[0, 0]), -1, -1], tokens[1].tolist()]
    assert fixture.drafter.propose(fixture.rounds[-1], 2).tokens.tolist() == tokens[:, :2].tolist()


def test_rows_may_change_between_rounds(model):
    fixture = RoundsFixture(model)
    *_, (tokens, _) = fixture.drafts(Strategy.FULL_LOOP)
    fixture.tables.load([owned_pages(2, 12, 24)[::-1]], [48, 48])
    turned = [None if tensor is None else tensor.flip(0) for tensor in fixture.rounds[-1]]
    assert torch.equal(fixture.drafter.propose(type(fixture.rounds[-1])(*turned)).tokens, tokens.flip(0))


def test_the_plan_says_that_there_are_no_later_steps(model):
    fixture = RoundsFixture(model)
    fixture.drafts(None)
    plan = fixture.drafter.plan
    assert plan.strategy is Strategy.FULL_LOOP
    assert "no later ones" in dict(plan.not_chosen)[Strategy.DEVICE_LOOP]
    with pytest.raises(StrategyError, match=r"device_loop cannot run: .* no later ones"):
        fixture.drafts(Strategy.DEVICE_LOOP)


def test_more_tokens_than_modules_are_refused_before_anything_is_allocated(model, monkeypatch):
    fixture = RoundsFixture(model)
    monkeypatch.setattr(torch, "zeros", None)
    with pytest.raises(BatchError, match=r"at most 3 a round, got num_speculative_tokens 4; .* Lower it to 3 or less"):
        Drafter(model, fixture.groups, fixture.tables, DrafterConfig(num_speculative_tokens=4))


def test_every_module_has_a_cache_of_its_own(model):
    [group] = model.layer_groups(16)
    assert group.layers == (0, 1, 2)
    caches = make_group("mtp", get("torch_reference"), group.spec, group.layers, num_pages=2, device=CPU).caches
    assert len({cache.key.data_ptr() for cache in caches.values()}) == COUNT


def test_the_prefix_that_requests_share_ends_before_what_a_round_rewrites(model):
    fixture = RoundsFixture(model)
    fixture.drafts(None)
    tables = RequestTables(page_sizes=[4], num_pages=[24], max_reqs=1, max_seq_len=48, device=CPU)
    tables.load([[list(range(12))]], [48], writable_from=[8])
    prompt = torch.zeros(2, dtype=torch.int64), torch.zeros(2, model.hidden_size)
    with pytest.raises(BatchError, match="write from position 8 on, got queries from position 6"):
        fixture.drafter.prefill(tables, [2], [10], *prompt)
    fixture.drafter.prefill(tables, [2], [12], *prompt)


def test_a_checkpoint_of_several_modules_is_loaded_whole(tmp_path):
    model = load_draft(write(tmp_path, V3, v3_modules(V3)), TARGET, dtype=torch.float32)
    assert isinstance(model, MtpModules) and len(model.prediction_modules) == COUNT
    for one, other in pairwise(model.prediction_modules):
        assert not torch.equal(one.fuse, other.fuse)


@pytest.mark.parametrize(("said", "held"), [(3, 2), (2, 3), (1, 2), (10**9, 1)])
def test_a_checkpoint_with_other_modules_than_it_says_is_refused(tmp_path, said, held):
    tensors = v3_modules({**V3, "num_nextn_predict_layers": held})
    folder = write(tmp_path, {**V3, "num_nextn_predict_layers": said}, tensors)
    with pytest.raises(CheckpointError, match=rf"says, {said} from model\.layers\.2 on, got {held};"):
        load(folder)


def test_a_gap_between_modules_is_refused(tmp_path):
    tensors = v3_tensors(V3) | v3_tensors(V3, module=2)
    with pytest.raises(CheckpointError, match=r"3 from model\.layers\.2 on, got 1"):
        load(write(tmp_path, V3, tensors))
