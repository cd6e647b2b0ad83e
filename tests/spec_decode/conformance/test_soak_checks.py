"""The soak family passes on the backends here, and names the defect of a broken one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import islice, pairwise
from mmap import mmap
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attn_backends.torch_reference import TorchReference
from builders import AdvanceLevel, AdvanceSupport, ReferenceBuilder
from spec_decode.conformance import check_backend, iter_checks, soak_rounds, soak_schedule
from spec_decode.conformance.report import Report
from spec_decode.conformance.runner import check_list
from spec_decode.conformance.soak import _RESIDENT_GROWTH, growth
from spec_decode.conformance.soak_checks import soak_length
from spec_decode.conformance.soak_rounds import SoakDrafter
from spec_decode.conformance.soak_schedule import Schedule, ScheduledRound, drafts_within
from spec_decode.drafter import Drafts, Strategy
from spec_decode.testing.memory import MemoryReading
from spec_decode.testing.outcome import Outcome
from tests.mutants import mutant_named
from tests.mutants.mutant import freeze, with_builder, with_forward

CPU = torch.device("cpu")
ROUNDS = 30


@pytest.fixture(autouse=True)
def small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer batch sizes to capture, and every round compared, so that the first that is wrong is the one named."""
    for name, value in (("MAX_REQS", 2), ("DRAFT_TOKENS", 3), ("COMPARE_EVERY", 1)):
        monkeypatch.setattr(soak_rounds, name, value)


def soaked(backend: Any, strategy: str = "*", rounds: int = ROUNDS, seed: int = 0) -> Report:
    with soak_length(rounds, seed):
        return check_backend(backend, device=CPU, checks=[f"soak.*-{strategy}]"], report=True)


def reason(backend: Any, strategy: str = "per_step", seed: int = 0) -> str:
    """What its one failure says."""
    (result,) = soaked(backend, strategy, seed=seed).results
    assert result.outcome is Outcome.FAIL, result
    return result.reason


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


def test_right_backend_passes_in_every_allowed_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_rounds, "COMPARE_EVERY", 10)
    assert soaked("triton_paged", "full_loop").counts[Outcome.PASS] == 1
    results = soaked("torch_reference").results
    assert [result.case for result in results] == [f"r{ROUNDS}-s0-{strategy.value}" for strategy in Strategy]
    assert [result.tags for result in results] == [(f"strategy:{strategy.value}",) for strategy in Strategy]
    ran = {r.tags[0].partition(":")[2]: r.evidence for r in results if r.outcome is Outcome.PASS}
    assert {"device_loop", "full_loop", "per_step", "eager"} <= {*ran}
    for found in ran.values():
        assert found["rounds"] == ROUNDS and ROUNDS / 10 <= found["compared"] < ROUNDS / 2
        assert found["joins"] > found["leaves"] >= found["limit_hits"] > 0 and found["tokens"] > ROUNDS
        assert {"allocated", "resident_growth"} <= {*found}


ELSEWHERE = replace(TorchReference.capabilities, devices=("cuda",))


@pytest.mark.parametrize(
    ("backend", "strategy", "why"),
    [
        (with_builder(Rebuilt), "full_loop", "REBUILD"),
        (type("Elsewhere", (TorchReference,), {"capabilities": ELSEWHERE})(), "*", "cuda"),
    ],
)
def test_impossible_strategy_is_unsupported_with_reason(backend: Any, strategy: str, why: str) -> None:
    report = soaked(backend, strategy)
    assert {result.outcome for result in report.results} == {Outcome.UNSUPPORTED} and not report.ok
    assert why in report.results[0].reason


def test_soak_runs_only_if_requested() -> None:
    assert "soak" not in {check.family for check in iter_checks("torch_reference", device=CPU)}
    for options in ({"families": ["soak"]}, {"checks": ["soak.*"]}):
        planned = check_list("torch_reference", device=CPU, **options)
        assert {check.family for check in planned.checks} == {"soak"} and len(planned.checks) == len(Strategy)


STALE = {
    "seq_lens": mutant_named("stale_seq_lens").backend,
    "window": freeze("torch_reference", "kv_start"),
    "kernel's seq_lens": freeze("triton_paged", "seq_lens"),
    "slots": freeze("triton_paged", "slot_mapping"),
}


@pytest.mark.parametrize("backend", STALE.values(), ids=STALE)
def test_stale_metadata_is_caught_and_named(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_rounds, "COMPARE_EVERY", 10)
    why = reason(backend, "full_loop")
    place = r"(token|logit|key cache|value cache) \[[\d, ]+\], row \d \(request \d+\)"
    assert re.match(
        rf"contract: round \d+ of {ROUNDS} in full_loop with seed 0, compared with eager: {place}; ", why
    ), why


def test_same_seed_fails_at_same_place() -> None:
    stale = STALE["seq_lens"]
    first = reason(stale, "full_loop", seed=1)
    assert first == reason(stale, "full_loop", seed=1)
    assert first != reason(stale, "full_loop", seed=2).replace("seed 2", "seed 1")


def tampered(
    monkeypatch: pytest.MonkeyPatch, tamper: Callable[[SoakDrafter, Drafts], Any], *, at: int, both: bool = False
) -> None:
    """Have something tamper with what a round leaves: in the candidate, or with eager too."""
    undisturbed = SoakDrafter.draft

    def draft(self: SoakDrafter, round_: ScheduledRound, verified: Any) -> Any:
        drafts = undisturbed(self, round_, verified)
        if round_.index == at and (both or self.drafter.plan.strategy is Strategy.PER_STEP):
            tamper(self, drafts)
        return drafts

    monkeypatch.setattr(SoakDrafter, "draft", draft)


@pytest.mark.parametrize(
    ("tamper", "what"),
    [
        (lambda drafter, drafts: drafts.tokens[:, 0].add_(1), "token [0, 0], row 0 (request"),
        (lambda drafter, drafts: drafts.logits[:, 0, 0].add_(1), "logit [0, 0, 0], row 0 (request"),
        (lambda drafter, drafts: drafter.drafter.tables.overflow[1:].bitwise_xor_(1), "overflow flag [1], row 1 "),
        (lambda drafter, drafts: drafter.cache[1][3, 2].add_(1), "value cache [3, 2, 0, 0], row "),
    ],
)
def test_each_kind_of_difference_is_named(tamper: Any, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tampered(monkeypatch, tamper, at=2)
    assert f"round 2 of {ROUNDS} in per_step with seed 0, compared with eager: {what}" in reason("torch_reference")


def test_wrong_overflow_of_both_drafters_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    tampered(monkeypatch, lambda drafter, drafts: drafter.drafter.tables.overflow[-1:].fill_(1), at=0, both=True)
    assert "within the limits: overflow flag [1], row 1 (request none); expected: 0" in reason("torch_reference")


def test_tokens_missing_from_both_drafters_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_schedule, "drafts_within", lambda *args: max(0, drafts_within(*args) - 1) or 1)
    assert "within the limits: token count " in reason("torch_reference")


def test_nan_in_both_drafters_is_caught() -> None:
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        return TorchReference.forward(*args, **kwargs) * float("nan")

    assert "logit [0, 0, 0], row 0 (request 1); expected: nan; got: nan" in reason(with_forward(poisoned))


def test_backend_keeping_tensors_is_caught() -> None:
    why = reason(with_builder(Leaks), "eager")
    assert (
        f"memory stays constant after 15 rounds of {ROUNDS} in eager with seed 0" in why
        and "got: a resident set" in why
    )


@pytest.mark.parametrize(
    ("allocated", "resident", "words"),
    [
        ((1000, 1000), (0, _RESIDENT_GROWTH), ""),
        ((1000, 1512), (0, 0), "1000 bytes allocated, then 1512"),
        ((1000, 488), (0, 0), "1000 bytes allocated, then 488"),
        ((None, None), (0, _RESIDENT_GROWTH + 1), "a resident set"),
        ((None, None), (None, None), ""),
    ],
)
def test_growth_counts_device_changes_and_large_host_memory(allocated: Any, resident: Any, words: str) -> None:
    found = growth(*map(MemoryReading, allocated, resident))
    assert found.startswith(words) and bool(found) == bool(words)


def test_crash_is_reported_with_its_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rebuilt, "builds", 0)
    why = reason(with_builder(Crashes))
    assert re.search(rf"round [1-9]\d* of {ROUNDS} in per_step with seed 0 raises nothing", why)
    assert "RuntimeError: CUDA error: an illegal memory access was encountered (in build, test_soak_checks" in why


def schedule(seed: int = 0, compare_every: int = 10, **limits: Any) -> Schedule:
    given = {"max_reqs": 6, "num_speculative_tokens": 3, "max_seq_len": 90, "page_size": 8, "window": 20, **limits}
    return Schedule(**given, first=(1, 2, 4, 6), compare_every=compare_every, seed=seed)


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
def test_every_scheduled_round_is_valid_for_tables(limits: dict[str, Any]) -> None:
    scheduled = schedule(**limits)
    pages = range(limits["max_reqs"] * scheduled._pages_for(limits["max_seq_len"]))
    for round_ in islice(scheduled, 60):
        owned = [page for row in round_.rows for page in row.pages]
        assert 1 <= len(round_.rows) <= limits["max_reqs"] and sorted([*scheduled._free, *owned]) == list(pages)
        for row in round_.rows:
            assert 0 <= row.context <= row.limit <= limits["max_seq_len"]
            assert len(row.pages) * limits["page_size"] >= row.limit
            assert 0 <= row.accepted <= limits["num_speculative_tokens"]


def test_first_rounds_have_required_sizes_and_are_compared() -> None:
    first = list(islice(schedule(compare_every=10**9), 4))

    assert [len(round_.rows) for round_ in first] == [1, 2, 4, 6]
    assert all(round_.compared for round_ in first)


@pytest.mark.parametrize("every", [1, 3, 10])
def test_one_round_per_interval_is_compared(every: int) -> None:
    rounds = list(islice(schedule(compare_every=every), 4 + 60 * every))[4:]
    compared = [round_.index for round_ in rounds if round_.compared]

    assert max(after - before for before, after in pairwise(compared)) < 2 * every
    assert len(compared) in (60, 61)


@pytest.fixture(scope="module")
def rounds() -> list[ScheduledRound]:
    return list(islice(schedule(), 500))


def test_joins_and_leaves_match_rows(rounds: list[ScheduledRound]) -> None:
    live, stuck = 0, set[int]()
    for round_ in rounds:
        live += round_.joined - round_.left
        assert len(round_.rows) == live and round_.at_limit <= round_.left
        assert not stuck & {row.request for row in round_.rows}
        stuck = {row.request for row in round_.rows if not row.drafts}


def test_freed_pages_are_reused_by_others(rounds: list[ScheduledRound]) -> None:
    owners: dict[int, set[int]] = {}
    for row in (row for round_ in rounds for row in round_.rows):
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
def test_schedule_reaches_edges_repeatedly(reached: Callable[[Any], bool], rounds: list[ScheduledRound]) -> None:
    assert sum(reached(row) for round_ in rounds for row in round_.rows) > 10


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 8), st.integers(1, 8))
def test_drafts_within_matches_stepwise_count(limit: int, context: int, accepted: int, k: int) -> None:
    accepted = min(accepted, k)
    drafts = 0
    if context + k + 1 <= limit:
        drafts, length = 1, context + accepted + 1
        while drafts < k and length < limit:
            drafts, length = drafts + 1, length + 1

    assert drafts_within(limit, context, accepted, k) == drafts
