"""A soak passes on the backends here, and names what is wrong with a broken one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import islice, pairwise
from mmap import mmap
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attn_backends import register, unregister
from attn_backends.torch_reference import TorchReference
from builders import AdvanceLevel, AdvanceSupport, BatchError, ReferenceBuilder
from spec_decode.drafter import Drafts, Strategy
from spec_decode.testing.outcome import Outcome
from spec_decode.tools.soak import Memory, Options, SoakResult, soak, soak_backend
from spec_decode.tools.soak.fixture import SoakDrafter
from spec_decode.tools.soak.memory import RESIDENT_GROWTH
from spec_decode.tools.soak.schedule import Schedule, ScheduledRound, ScheduleLimits, drafts_within
from tests.mutants import MUTANTS, freeze, with_builder, with_forward

CPU = torch.device("cpu")
SHORT = Options(rounds=60, max_reqs=2, num_speculative_tokens=3)
SHORTER = Options(rounds=22, max_reqs=2, num_speculative_tokens=2)
ALONE = replace(SHORTER, compare_every=1, strategies=(Strategy.PER_STEP,))
"""For what no strategy has a part in."""
EAGER = (Strategy.EAGER,)


class Rebuilt(ReferenceBuilder):
    """Built on the host at every step, so that what `build` does wrong happens in every round."""

    builds = 0

    @classmethod
    def advance_support(cls, spec: Any, device: Any) -> AdvanceSupport:
        return AdvanceSupport(AdvanceLevel.REBUILD, "for the test")

    def build(self, batch: Any, *, horizon: int = 0) -> Any:
        Rebuilt.builds += 1
        return super().build(batch, horizon=horizon)


class Leaks(Rebuilt):
    def build(self, batch: Any, *, horizon: int = 0) -> Any:
        # Pages of its own: the heap of a process that has run thousands of tests has this much to spare.
        kept = torch.frombuffer(mmap(-1, 1 << 20), dtype=torch.float32).fill_(1)
        self.kept = [*getattr(self, "kept", []), kept]
        return super().build(batch, horizon=horizon)


class Crashes(Rebuilt):
    def build(self, batch: Any, *, horizon: int = 0) -> Any:
        if Rebuilt.builds > 100:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().build(batch, horizon=horizon)


def broken(result: SoakResult) -> Any:
    """The failure that ended it."""
    assert result.outcome in (Outcome.FAIL, Outcome.ERROR), result
    assert result.failure is not None
    return result.failure


@cache
def soaked(name: str) -> SoakResult:
    return soak_backend(name, CPU, SHORT)


@pytest.mark.xdist_group("soaked")
@pytest.mark.parametrize("name", ["torch_reference", "triton_paged"])
def test_a_right_backend_passes(name: str) -> None:
    result = soaked(name)

    assert result.outcome is Outcome.PASS, result.reason
    assert (result.rounds, result.warm_up) == (60, 30)
    assert result.compared >= 60 / 10
    assert result.joins > result.leaves > result.limit_hits > 0
    assert result.tokens > 60


def test_a_backend_that_must_be_rebuilt_is_soaked_step_by_step() -> None:
    result = soak_backend(with_builder(Rebuilt), CPU, SHORTER)

    assert (result.outcome, list(result.strategies)) == (Outcome.PASS, ["per_step", "eager"])
    assert "REBUILD" in result.refused["full_loop"]


@pytest.mark.xdist_group("soaked")
def test_every_strategy_that_can_be_run_takes_its_turn_and_is_compared() -> None:
    result = soaked("triton_paged")

    assert result.outcome is Outcome.PASS, result.reason
    assert {*result.strategies, *result.refused} == {strategy.value for strategy in Strategy}
    assert {"device_loop", "full_loop", "per_step", "eager"} <= {*result.strategies}
    assert sum(each.rounds for each in result.strategies.values()) == result.rounds == 60
    assert sum(each.compared for each in result.strategies.values()) == result.compared
    assert all(each.compared for each in result.strategies.values())


def test_a_strategy_that_was_asked_for_is_soaked_alone() -> None:
    result = soak_backend("torch_reference", CPU, replace(SHORTER, strategies=(Strategy.PER_STEP,)))

    assert (result.outcome, list(result.strategies)) == (Outcome.PASS, ["per_step"])
    assert result.repro.endswith("--device cpu --strategy per_step")


def test_a_strategy_that_was_asked_for_and_cannot_be_run_is_no_pass() -> None:
    result = soak_backend(with_builder(Rebuilt), CPU, replace(SHORTER, strategies=(Strategy.FULL_LOOP,)))

    assert result.outcome is Outcome.UNSUPPORTED and "full_loop was asked for" in result.reason


def test_a_fault_of_one_strategy_is_found_and_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = SoakDrafter.draft

    def draft(self: SoakDrafter, round_: ScheduledRound, verified: Any) -> Any:
        drafts = undisturbed(self, round_, verified)
        if self.strategy == "per_step" and round_.index > 20:
            tamper(self, drafts, "logit")
        return drafts

    monkeypatch.setattr(SoakDrafter, "draft", draft)
    result = soak_backend("torch_reference", CPU, replace(SHORT, rounds=200))

    assert broken(result).strategy == "per_step" and "per_step, row" in result.reason


STALE = {
    "seq_lens": next(mutant.backend for mutant in MUTANTS if mutant.name == "stale_seq_lens"),
    "window": freeze("torch_reference", "kv_start"),
    "kernel's seq_lens": freeze("triton_paged", "seq_lens"),
    "slots": freeze("triton_paged", "slot_mapping"),
}


@pytest.mark.parametrize("backend", STALE.values(), ids=STALE)
def test_stale_metadata_is_caught_and_named(backend: Any) -> None:
    result = soak_backend(backend, CPU, SHORT)
    failure = broken(result)

    assert failure.what in ("token", "logit", "cache")
    assert failure.row is not None and failure.request is not None
    assert failure.round == result.rounds
    place = f"{failure.what} in round {failure.round}, {failure.strategy}, row {failure.row} "
    assert result.reason.startswith(place) and "seed 0" in result.reason
    assert result.repro.endswith("_mutant --rounds 60 --max-reqs 2 -k 3 --compare-every 10 --seed 0 --device cpu")


def test_the_same_seed_fails_in_the_same_place_and_another_one_elsewhere() -> None:
    def failure(seed: int) -> Any:
        return broken(soak_backend(STALE["seq_lens"], CPU, replace(ALONE, seed=seed)))

    assert failure(1) == failure(1) != failure(2)


def tamper(drafter: SoakDrafter, drafts: Drafts, what: str) -> None:
    if what == "token":
        drafts.tokens[:, 0] += 1
    elif what == "logit":
        drafts.logits[:, 0, 0] += 1
    elif what == "cache":
        drafter.group.caches[0].value[3, 2] += 1
    else:
        drafter.drafter.tables.overflow[0] ^= 1


@pytest.mark.parametrize("what", ["token", "logit", "cache", "flag"])
def test_each_kind_of_difference_is_named(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = SoakDrafter.draft

    def draft(self: SoakDrafter, round_: ScheduledRound, verified: Any) -> Any:
        drafts = undisturbed(self, round_, verified)
        if self.strategy == "per_step" and round_.index == 2:
            tamper(self, drafts, what)
        return drafts

    monkeypatch.setattr(SoakDrafter, "draft", draft)
    failure = broken(soak_backend("torch_reference", CPU, ALONE))

    assert (failure.what, failure.round) == (what, 2)


def test_a_flag_that_both_drafters_raise_wrongly_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = SoakDrafter.draft

    def draft(self: SoakDrafter, round_: ScheduledRound, verified: Any) -> Any:
        drafts = undisturbed(self, round_, verified)
        self.drafter.tables.overflow[-1] = 1
        return drafts

    monkeypatch.setattr(SoakDrafter, "draft", draft)
    failure = broken(soak_backend("torch_reference", CPU, ALONE))

    assert (failure.what, failure.row, failure.request) == ("flag", 1, None)


def test_tokens_that_both_drafters_leave_out_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "spec_decode.tools.soak.schedule.drafts_within", lambda *args: max(0, drafts_within(*args) - 1) or 1
    )
    failure = broken(soak_backend("torch_reference", CPU, ALONE))

    assert failure.what == "token" and "room for" in failure.detail


def test_nan_is_caught_though_eager_has_it_too() -> None:
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        return TorchReference.forward(*args, **kwargs) * float("nan")

    assert broken(soak_backend(with_forward(poisoned), CPU, ALONE)).what == "nan"


def test_a_backend_that_keeps_tensors_is_caught() -> None:
    result = soak_backend(with_builder(Leaks), CPU, replace(SHORT, strategies=EAGER))

    assert broken(result).what == "memory" and "resident set grew" in result.reason
    assert result.memory is not None and result.rounds == 60


@pytest.mark.parametrize(
    ("allocated", "resident", "words"),
    [
        ((1000, 1000), (0, RESIDENT_GROWTH), None),
        ((1000, 1512), (0, 0), "allocated on the device"),
        ((1000, 488), (0, 0), "allocated on the device"),
        ((None, None), (0, RESIDENT_GROWTH + 1), "resident set grew"),
        ((None, None), (None, None), None),
    ],
)
def test_growth_is_any_change_on_the_device_and_more_than_is_allowed_on_the_host(
    allocated: Any, resident: Any, words: str | None
) -> None:
    memory = Memory(
        allocated_warm=allocated[0],
        allocated_end=allocated[1],
        reserved_most=None,
        resident_warm=resident[0],
        resident_end=resident[1],
        resident_growth_allowed=RESIDENT_GROWTH,
    )
    found = memory.growth()

    assert (words in found) if found and words else found is words


def test_a_crash_is_the_backends_failure() -> None:
    Rebuilt.builds = 0
    result = soak_backend(with_builder(Crashes), CPU, SHORT)
    failure = broken(result)

    assert (result.outcome, failure.what) == (Outcome.ERROR, "exception")
    assert 0 < failure.round < 60
    assert "RuntimeError: CUDA error: an illegal memory access" in result.reason


def test_a_backend_for_another_device_is_refused_with_its_reasons() -> None:
    class Elsewhere(TorchReference):
        name = "elsewhere"
        capabilities = replace(TorchReference.capabilities, devices=("cuda",))

    result = soak_backend(Elsewhere(), CPU, SHORTER)

    assert result.outcome is Outcome.UNSUPPORTED and "cuda" in result.reason


def test_a_backend_that_does_not_load_costs_the_others_nothing() -> None:
    register("missing", "no_such_package:Backend", extra="missing")
    try:
        report = soak(["missing", "torch_reference"], device=CPU, options=ALONE)
    finally:
        unregister("missing")

    assert [result.outcome for result in report.results] == [Outcome.UNAVAILABLE, Outcome.PASS]
    assert not report.ok


def test_a_device_that_was_lost_is_not_blamed_on_the_next_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    report = soak(["torch_reference"], device=torch.device("cuda"), options=SHORTER)

    assert report.results[0].outcome is Outcome.NOT_RUN and "illegal memory access" in report.results[0].reason
    assert not report.ok


def test_progress_is_told_now_and_then() -> None:
    told: list[SoakResult] = []
    options = Options(rounds=140, max_reqs=1, num_speculative_tokens=1, strategies=EAGER)
    soak_backend("torch_reference", CPU, options, told.append)

    assert [result.rounds for result in told] == [128, 140]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rounds": 41}, "at least 42 rounds, got 41"),
        ({"compare_every": 0}, "one of every N rounds"),
        ({"max_reqs": 0}, "1 to 256 requests"),
        ({"max_reqs": 257}, "1 to 256 requests"),
        ({"num_speculative_tokens": 0}, "at least 1 token"),
        ({"seed": -1}, "seed must be 0"),
    ],
)
def test_options_that_make_no_soak_are_refused(options: Any, words: str) -> None:
    with pytest.raises(BatchError, match=words):
        Options(**options)


def test_more_draft_tokens_than_a_request_has_room_for_are_refused() -> None:
    with pytest.raises(BatchError, match="K = 64; fewer than two rounds"):
        soak_backend("torch_reference", CPU, Options(num_speculative_tokens=64))


def schedule(seed: int = 0, compare_every: int = 10, **limits: Any) -> Schedule:
    given = {"max_reqs": 6, "num_speculative_tokens": 3, "max_seq_len": 90, "page_size": 8, "window": 20, **limits}
    return Schedule(ScheduleLimits(**given), first=(1, 2, 4, 6), compare_every=compare_every, seed=seed)


settings = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**62),
        "max_reqs": st.integers(6, 9),
        "num_speculative_tokens": st.integers(1, 8),
        "max_seq_len": st.integers(30, 200),
        "page_size": st.sampled_from((1, 4, 64)),
        "window": st.none() | st.integers(1, 300),
    }
)


@given(settings)
def test_every_round_is_one_that_tables_accept(limits: dict[str, Any]) -> None:
    for round_ in islice(schedule(**limits), 60):
        pages = [page for row in round_.rows for page in row.pages]
        assert 1 <= len(round_.rows) <= limits["max_reqs"]
        assert len(set(pages)) == len(pages)
        for row in round_.rows:
            assert 0 <= row.context <= row.limit <= limits["max_seq_len"]
            assert len(row.pages) * limits["page_size"] >= row.limit
            assert 0 <= row.accepted <= limits["num_speculative_tokens"]


@given(settings)
def test_every_page_is_in_one_place(limits: dict[str, Any]) -> None:
    made = schedule(**limits)
    for round_ in islice(made, 60):
        owned = [page for row in round_.rows for page in row.pages]
        assert sorted([*made._free, *owned]) == list(range(made.limits.num_pages))


def test_the_first_rounds_have_the_sizes_asked_for_and_are_compared() -> None:
    first = list(islice(schedule(compare_every=10**9), 4))

    assert [len(round_.rows) for round_ in first] == [1, 2, 4, 6]
    assert all(round_.compared for round_ in first)


@pytest.mark.parametrize("every", [1, 3, 10])
def test_of_so_many_rounds_in_a_row_one_is_compared(every: int) -> None:
    rounds = list(islice(schedule(compare_every=every), 4 + 60 * every))[4:]
    compared = [round_.index for round_ in rounds if round_.compared]

    assert max(after - before for before, after in pairwise(compared)) < 2 * every
    assert len(compared) in (60, 61)


def test_joins_and_leaves_account_for_the_rows() -> None:
    live = 0
    for round_ in islice(schedule(), 500):
        live += round_.joined - round_.left
        assert len(round_.rows) == live and round_.at_limit <= round_.left


def test_freed_pages_are_taken_over_by_others() -> None:
    owners: dict[int, set[int]] = {}
    for round_ in islice(schedule(), 500):
        for row in round_.rows:
            for page in row.pages:
                owners.setdefault(page, set()).add(row.request)

    assert max(map(len, owners.values())) > 20


EDGES: dict[str, Callable[[Any], bool]] = {
    "empty": lambda row: row.context == 0,
    "page edge": lambda row: row.context % 8 == 0 and row.context > 0,
    "before a page edge": lambda row: row.context % 8 == 7,
    "window": lambda row: row.context == 20,
    "limit at a page edge": lambda row: row.limit % 8 == 0,
    "longest limit": lambda row: row.limit == 90,
    "just fits": lambda row: row.context + 4 == row.limit,
    "no room": lambda row: row.drafts == 0,
    "stops on the way": lambda row: 0 < row.drafts < 3,
    "none accepted": lambda row: row.accepted == 0,
    "all accepted": lambda row: row.accepted == 3,
    "greedy": lambda row: row.temperature == 0,
    "hot": lambda row: row.temperature == 1,
}


@pytest.mark.parametrize("reached", EDGES.values(), ids=EDGES)
def test_edges_are_met_again_and_again(reached: Callable[[Any], bool]) -> None:
    rows = [row for round_ in islice(schedule(), 500) for row in round_.rows]

    assert sum(map(reached, rows)) > 10


def test_a_request_that_cannot_draft_is_gone_in_the_next_round() -> None:
    stuck: set[int] = set()
    for round_ in islice(schedule(), 500):
        assert not stuck & {row.request for row in round_.rows}
        stuck = {row.request for row in round_.rows if not row.drafts}


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 8), st.integers(1, 8))
def test_the_room_for_drafts_is_what_a_walk_finds(limit: int, context: int, accepted: int, k: int) -> None:
    accepted = min(accepted, k)
    drafts = 0
    if context + k + 1 <= limit:
        drafts, length = 1, context + accepted + 1
        while drafts < k and length < limit:
            drafts, length = drafts + 1, length + 1

    assert drafts_within(limit, context, accepted, k) == drafts
