"""The engine's batching: other requests that join, leave, wait, or are cancelled or preempted do not change a text."""

import random
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from train_pair.attention import causal_attention, positions_of

from attn_backends import get
from attn_backends.torch_reference import TorchReference
from builders import BatchError
from spec_decode.engine.request import Handle, RequestState
from spec_decode.model_api import DraftModel, LayerGroup
from spec_decode.models import LlamaTarget
from spec_decode.paged import GraphMode
from tests.factories import make_config, make_request, resampled
from tests.spec_decode.drafter.third_party_backends import Uncapturable
from tests.spec_decode.engine import engine_helpers
from tests.spec_decode.engine.engine_helpers import PAIR, overflows, texts

VOCAB = PAIR[0].vocab_size
REFERENCE = get("torch_reference")
make_engine = partial(engine_helpers.make_engine, max_num_seqs=4)


def make_requests(count, seed=0, *, prompt=12, new=20):
    """Random requests, greedy and hot by turns, every third with stop ids."""
    rng = random.Random(seed)
    return [
        make_request(
            prompt=[rng.randrange(VOCAB) for _ in range(rng.randint(1, prompt))],
            max_tokens=rng.randint(1, new),
            temperature=rng.choice([0.0, 1.0]),
            seed=index,
            stop_token_ids=frozenset(rng.sample(range(VOCAB), 2)) if index % 3 == 0 else frozenset(),
        )
        for index in range(count)
    ]


_UNDISTURBED = {}


def undisturbed(requests, **options):
    """Their texts where all begin at once and have room, as in any number of rows (test_engine.py); decoded once in a
    process, for several cases compare themselves with the same."""
    key = repr((requests, options))
    if key not in _UNDISTURBED:
        _UNDISTURBED[key] = texts(make_engine(**{"max_num_seqs": len(requests), **options}), requests)
    return _UNDISTURBED[key]


def run_to_end(engine):
    while engine.step():
        pass


@pytest.mark.slow
def test_requests_that_come_and_go_match_each_alone():
    requests, rng = make_requests(250, prompt=6, new=18), random.Random(1)
    # A quarter of the pages that the rows may come to need: they grow into preemption again and again.
    engine = make_engine(max_num_seqs=12, max_model_len=24, page_size=1, num_pages=64, max_prefill_tokens=16)
    handles, cancelled = [], set()
    while len(handles) < 250 or engine.step():
        for request in requests[len(handles) : len(handles) + rng.randint(0, 5)]:
            handles.append(engine.submit(request))
        engine.step()
        recent = len(handles) - 1 - rng.randint(0, 30)
        if rng.random() < 0.3 and recent >= 0 and not handles[recent].done:
            engine.cancel(handles[recent])
            cancelled.add(recent)
    assert engine.stats.preemptions > 15 and len(cancelled) > 20
    assert engine.pool.num_free == engine.pool.num_pages
    assert not overflows(engine)
    for index, (handle, text) in enumerate(
        zip(handles, undisturbed(requests, max_num_seqs=1, max_model_len=24), strict=True)
    ):
        ids = handle.generation.token_ids
        assert ids == (text[: len(ids)] if index in cancelled else text)


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_preempted_request_continues_its_text(verification):
    # With these seeds, one goes on from a token that the target would not draw again by itself.
    requests = [make_request(prompt=[i, 3], max_tokens=45, temperature=1.0, seed=16 + i) for i in range(4)]
    tight = make_engine(num_pages=26, verification=verification)
    assert texts(tight, requests) == undisturbed(requests, verification=verification)
    # More was prefilled again than prompts: whoever was preempted had a text.
    assert tight.stats.preemptions >= 2 and tight.stats.prefill_tokens > 4 * 2 + 20
    assert tight.pool.num_free == 26


def test_unneeded_pages_preempt_nobody():
    # Each keeps no draft, but the host must reckon with all of them until it hears of the round.
    engine = make_engine(num_pages=17, page_size=1, verification="synthetic:0")
    engine.generate([make_request(prompt=[1], max_tokens=10), make_request(prompt=[2], max_tokens=4)])
    assert engine.stats.preemptions == 0


@pytest.mark.parametrize(("num_pages", "rounds"), [(66, 1), (67, 1 + 8)])
def test_request_owns_pages_for_next_rounds(num_pages, rounds):
    """For the next round, or for several if the pool holds the longest request."""
    engine = make_engine(max_num_seqs=1, page_size=1, num_pages=num_pages)
    engine.submit(make_request(prompt=[1, 2, 3], max_tokens=40))
    owned = []
    while engine.step():
        owned.append(engine.pool.num_pages - engine.pool.num_free)
    # The prompt, its first token and the drafts; the longest text, and the drafts that are run over behind it.
    assert owned[0] == 3 + 1 + 3 and max(owned) <= 43 + 3
    grown = [after - before for before, after in pairwise(owned) if after]
    assert min(grown) >= 0 and (1 + rounds) * 4 >= max(grown) > (rounds - 1) * 4


def test_request_larger_than_pool_is_rejected():
    engine = make_engine(num_pages=4)
    engine.submit(make_request(prompt=[1] * 7, max_tokens=6))
    with pytest.raises(
        BatchError, match="has 7 prompt tokens and max_tokens 7, together more than the 13 that fit 4 pages of 4"
    ):
        engine.submit(make_request(prompt=[1] * 7, max_tokens=7))


@pytest.mark.parametrize(("chunk", "steps"), [(1, 3), (3, 0), (7, 3)])
def test_chunked_prompt_gives_same_text(chunk, steps):
    requests = make_requests(4, 5, prompt=20, new=8)
    engine = make_engine(steps=steps, max_prefill_tokens=chunk)
    assert texts(engine, requests) == undisturbed(requests, steps=steps)
    assert engine.stats.prefill_tokens == sum(len(request.prompt) for request in requests)


def test_long_prompt_prefills_one_chunk_per_round():
    engine, prefilled = make_engine(max_prefill_tokens=4), []
    short = engine.submit(make_request(prompt=[1], max_tokens=50))
    engine.step()
    long = engine.submit(make_request(prompt=[2] * 40, max_tokens=2))
    while not long.generation.token_ids:
        rounds, before = engine.stats.rounds, engine.stats.prefill_tokens
        engine.step()
        prefilled.append(engine.stats.prefill_tokens - before)
        assert engine.stats.rounds == rounds + 1 or short.done
    assert max(prefilled) == 4 and len(short.generation.token_ids) >= 10


@pytest.mark.parametrize(
    ("when", "steps"),
    [
        ("waiting", 3),
        ("in its prompt", 3),
        ("running", 0),
        ("running", 3),
        ("in its own callback", 3),
        ("in another's", 3),
    ],
)
def test_cancelled_request_leaves_other_texts_unchanged(when, steps):
    requests = [resampled(r, temperature=1.0, max_tokens=12, stop_token_ids=frozenset()) for r in make_requests(4, 7)]
    requests[2] = replace(requests[2], prompt=[5] * 12)
    engine = make_engine(max_num_seqs=2 if when == "waiting" else 4, steps=steps, max_prefill_tokens=9)
    handles = []

    def on_token(index):
        def callback(token):
            if (when, index) in (("in its own callback", 2), ("in another's", 1)):
                engine.cancel(handles[2])

        return callback

    handles += [engine.submit(request, on_token=on_token(i)) for i, request in enumerate(requests)]
    for _ in range({"waiting": 1, "in its prompt": 2, "running": 4}.get(when, 0)):
        engine.step()
    if when in ("waiting", "in its prompt", "running"):
        assert not handles[2].done
        engine.cancel(handles[2])
    run_to_end(engine)
    wanted = undisturbed(requests, steps=steps)
    found = [handle.generation.token_ids for handle in handles]
    assert handles[2].generation.finish_reason == "abort" and found[2] == wanted[2][: len(found[2])]
    assert [*found[:2], found[3]] == [*wanted[:2], wanted[3]]
    assert engine.pool.num_free == engine.pool.num_pages
    engine.cancel(handles[0])
    assert handles[0].generation.finish_reason == "length"


def test_only_a_handle_can_be_cancelled():
    with pytest.raises(BatchError, match="handle must be of type Handle, got NoneType"):
        make_engine().cancel(None)


def test_step_does_not_visit_waiting_requests(monkeypatch):
    seen, finished, done = [], RequestState.finished.fget, Handle.done.fget
    monkeypatch.setattr(RequestState, "finished", property(lambda state: seen.append(state.handle) or finished(state)))
    monkeypatch.setattr(Handle, "done", property(lambda handle: seen.append(handle) or done(handle)))
    engine = make_engine(max_num_seqs=1, steps=0)
    engine.generate([make_request(prompt=[1], max_tokens=2) for _ in range(60)])
    # Each of them, and whoever is next, in each of its steps.
    assert len(seen) < 60 * 15


def test_cancelled_waiting_requests_are_dropped():
    engine, requests = make_engine(max_num_seqs=1), make_requests(6, 3)
    handles = [engine.submit(request) for request in requests]
    engine.step()
    for at in (1, 2, 4, 5):
        engine.cancel(handles[at])
    run_to_end(engine)
    left = [handles[at].generation.token_ids for at in (0, 3)]
    assert left == undisturbed([requests[0], requests[3]]) and not engine.step() and not engine._scheduler._waiting


def test_callback_may_submit_a_request():
    engine, handles = make_engine(), []
    second = make_request(prompt=[4], max_tokens=5, temperature=1.0, seed=3)

    def chain(token):
        if len(handles) == 1:
            handles.append(engine.submit(second))

    handles.append(engine.submit(make_request(prompt=[3], max_tokens=9), on_token=chain))
    run_to_end(engine)
    assert handles[1].generation.token_ids == undisturbed([second])[0]


def test_a_step_within_a_step_is_refused():
    engine = make_engine()
    engine.submit(make_request(prompt=[3], max_tokens=9), on_token=lambda token: engine.step())
    with pytest.raises(BatchError, match="cannot start inside another"):
        while engine.step():
            pass


@pytest.mark.parametrize(("every", "num_pages"), [(1, None), (4, 12)])
def test_raising_callback_loses_no_token(num_pages, every):
    requests = [resampled(request, max_tokens=10) for request in make_requests(4, 9)]
    engine, streamed = make_engine(num_pages=num_pages), []

    def fail(index):
        def on_token(token):
            streamed.append((index, token))
            if len(streamed) % every == 0:
                raise RuntimeError("enough")

        return on_token

    handles = [engine.submit(request, on_token=fail(index)) for index, request in enumerate(requests)]
    failures, busy = 0, True
    while busy:
        try:
            busy = engine.step()
        except RuntimeError:
            failures += 1
        assert not overflows(engine)
    wanted = undisturbed(requests)
    assert failures > 5 and [handle.generation.token_ids for handle in handles] == wanted
    assert [[token for i, token in streamed if i == index] for index in range(4)] == wanted


def test_tokens_are_reported_one_round_later(monkeypatch):
    engine, events = make_engine(), []
    propose = engine.drafter.propose

    def spy(verified):
        events.append("round")
        return propose(verified)

    monkeypatch.setattr(engine.drafter, "propose", spy)
    engine.generate([make_request(prompt=[1], max_tokens=9)], on_token=lambda index, token: events.append("token"))
    rounds_before = [events[:at].count("round") for at, event in enumerate(events) if event == "token"]
    # The first token is the prompt's own; every later one was decided a round before the latest.
    assert rounds_before[1] == 2


def test_next_prompts_are_launched_before_first_tokens_are_read():
    """A device with nothing enqueued would idle."""
    engine = make_engine(steps=0, max_num_seqs=1)
    first, second = (engine.submit(make_request(prompt=[5], max_tokens=1)) for _ in range(2))
    assert engine.step() and not first.done
    assert engine.step() is False and first.done and second.done


def test_request_near_limit_drafts_remaining_room(monkeypatch):
    engine, room, proposed = make_engine(max_num_seqs=1), [], []
    propose = engine.drafter.propose

    def spy(verified):
        room.append(int(engine._batch.max_lens[0] - engine._batch.lens[0]) - 1)
        proposed.append((propose(verified).tokens[0] >= 0).sum().item())

    monkeypatch.setattr(engine.drafter, "propose", spy)
    engine.generate([make_request(prompt=[1], max_tokens=20)])
    assert proposed == [min(3, left) for left in room] and {0, 3} <= set(proposed)


@pytest.mark.parametrize("steps", [0, 3])
def test_row_with_unread_end_stays_within_its_pages(steps):
    engine = make_engine(steps=steps, page_size=1)
    engine.submit(make_request(prompt=[1], max_tokens=5))
    engine.step()
    for _ in range(9):
        for request, count in engine._scheduler._missing_pages().items():
            request.pages += engine.pool.allocate(count)
        engine._grow_tables()
        engine._run_round()
    assert engine._batch.lens.tolist() == [6, 0, 0, 0]
    assert not overflows(engine)


def layer_windows(layer):
    return None if layer == 0 else 5


class TwoGroups(LlamaTarget):
    """A full layer and one with a sliding window of 5."""

    def layer_groups(self, page_size):
        [group] = super().layer_groups(page_size)
        return [
            LayerGroup(name=name, spec=replace(group.spec, sliding_window=layer_windows(layer)), layers=(layer,))
            for layer, name in enumerate(("full", "sliding"))
        ]


class SameModel(DraftModel):
    """A draft that is the target itself, and so is right whenever its positions and its cache are."""

    position_offset = 1

    def __init__(self, target):
        super().__init__()
        self.target = target
        self.vocab_size, self.max_positions = target.vocab_size, target.max_positions
        self.hidden_size = self.target_states_size = target.hidden_size

    def layer_groups(self, page_size):
        return self.target.layer_groups(page_size)

    def forward(self, inputs):
        return inputs.kept(self.target(inputs.token_ids, inputs.positions, inputs.attention).hidden)

    def logits(self, hidden):
        return self.target.logits(hidden)


def two_groups():
    torch.manual_seed(5)
    return TwoGroups(make_config(num_layers=2)).eval().requires_grad_(False)


def dense_text(target, request):
    """Greedy continuation of a target with two groups by attention over the whole text each time."""
    tokens = torch.tensor([list(request.prompt)])

    def attend(inputs):
        return causal_attention(1, layer_windows(inputs.layer))(inputs)

    for _ in range(request.sampling.max_tokens):
        hidden = target(tokens.flatten(), positions_of(tokens), attend).hidden
        tokens = torch.cat([tokens, target.logits(hidden[-1:]).argmax(-1)[None]], 1)
    return tokens[0, len(request.prompt) :].tolist()


@pytest.mark.parametrize(("chunk", "graph_mode"), [(512, GraphMode.NONE), (2, GraphMode.FULL)])
def test_draft_equal_to_target_is_always_accepted(chunk, graph_mode):
    target = two_groups()
    requests = [make_request(prompt=p, max_tokens=n) for p, n in (([1, 2, 3, 4, 5, 6, 7], 17), ([9], 12), ([3, 8], 1))]
    engine = make_engine((target, SameModel(target)), max_prefill_tokens=chunk, graph_mode=graph_mode)
    results = engine.generate(requests)
    assert [result.token_ids for result in results] == [dense_text(target, request) for request in requests]
    assert [result.accepted for result in results] == [[3, 3, 3, 3], [3, 3, 2], []]


def test_draft_equal_to_target_stays_accepted_after_preemption():
    target = two_groups()
    requests = [make_request(prompt=[index, 4], max_tokens=30) for index in range(3)]
    engine = make_engine((target, SameModel(target)), num_pages=14)
    results = engine.generate(requests)
    assert engine.stats.preemptions > 0 and engine.stats.mean_accepted > 2.5
    assert [result.token_ids for result in results] == [dense_text(target, request) for request in requests]


class Other(TorchReference):
    name = "other"


def test_every_group_gets_its_chosen_backend():
    target, request = two_groups(), make_request(prompt=[1, 2, 3], max_tokens=12)
    by_name = {"full": REFERENCE, "sliding": Other()}
    engines = [
        make_engine((target, SameModel(target)), backend=by_name, draft_backend=lambda group: by_name[group.name])
    ]
    engines.append(make_engine((target, SameModel(target)), backend=Other(), draft_backend=by_name))
    wanted = [["torch_reference", "other"], ["other", "other"]]
    for engine, names in zip(engines, wanted, strict=True):
        assert [group.backend.name for group in engine.target.groups] == names
        assert [group.backend.name for group in engine.drafter.groups] == ["torch_reference", "other"]
        assert texts(engine, [request]) == [dense_text(target, request)]


CAPTURED = {
    "plain": (0, {}, ()),
    "plain, in pieces": (0, {"graph_mode": GraphMode.PIECEWISE}, (0,)),
    "drafted, in pieces": (3, {"graph_mode": GraphMode.PIECEWISE}, (0,)),
    "drafted, of attention that no graph holds": (3, {"backend": Uncapturable()}, (0,)),
}


@pytest.mark.parametrize(("steps", "options", "uncaptured"), CAPTURED.values(), ids=CAPTURED)
def test_captured_target_matches_eager_one(steps, options, uncaptured):
    requests = make_requests(5, 11, new=8)
    engine = make_engine(steps=steps, **{"graph_mode": GraphMode.FULL, **options})
    assert texts(engine, requests) == undisturbed(requests, steps=steps)
    assert engine.target.plan.uncaptured_groups == uncaptured and engine.target.graphs.complete
