"""The checks of recurrent states, over an engine in a few lines of Python and over engines that are wrong."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from builders import GraphSupport
from engine_kits.hash_recurrence import WINDOW, Slots, sequential
from engine_kits.state_checks import Play, recurrent_backend
from engine_kits.state_traffic import DRAFTS, DrawnRequest, DrawnStep, StateEngine, Traffic
from spec_decode.conformance.report import Report
from spec_decode.conformance.runner import check_list, run
from spec_decode.testing.outcome import Outcome
from spec_decode.testing.subject import Subject
from tests.factories import CPU

MIXED = Traffic(chunks=(1, 3), drafts=(0, 2, DRAFTS), idle=0.2, elsewhere=0.7)
SEQUENTIAL, OWN, ADDRESSES = (
    f"state.{check}"
    for check in ("states_follow_accepted_tokens", "rounds_write_their_own_slots", "builds_for_a_graph_keep_addresses")
)


class PlainEngine(StateEngine):
    """A column of slots for each place of a request, run row by row: every step as a verification."""

    rows = 4

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots(1 + self.rows * (1 + DRAFTS), DRAFTS, null=0)
        self.place: dict[DrawnRequest, int] = {}
        self.accepted = [1] * self.rows

    def columns(self, request: DrawnRequest) -> torch.Tensor:
        return torch.arange(1 + DRAFTS)[None] + 1 + self.place[request] * (1 + DRAFTS)

    def admit(self, request: DrawnRequest) -> None:
        self.place[request] = min(set(range(self.rows)) - set(self.place.values()))
        self.begin(request)
        first = self.columns(request)[0, 0]
        state, window = sequential(request.text[: request.done])
        self.slots.states[first] = state
        self.slots.windows[first, :WINDOW] = torch.tensor(window)

    def begin(self, request: DrawnRequest) -> None:
        self.accepted[self.place[request]] = 1

    def finish(self, request: DrawnRequest) -> None:
        del self.place[request]

    def run(self, steps: Sequence[DrawnStep], padding: int) -> None:
        for step in steps:
            columns, accepted = self.columns(step.request), torch.tensor([self.count(step)])
            starts = torch.tensor([0, len(step.tokens)])
            if step.drafts or not step.request.prefilling:
                self.slots.slide_drafts(columns[:, 0], accepted, starts, step.tokens)
                self.slots.run_drafts(columns, accepted, starts, step.tokens)
            else:
                known = torch.tensor([step.request.done > 0])
                self.slots.slide(columns[:, 0], starts, step.tokens, known)
                self.slots.run(columns[:, 0], starts, step.tokens, known)

    def count(self, step: DrawnStep) -> int:
        return self.accepted[self.place[step.request]]

    def accept(self, steps: Sequence[DrawnStep], kept: Sequence[int]) -> None:
        for step, drafts in zip(steps, kept, strict=True):
            self.accepted[self.place[step.request]] = 1 + drafts

    def held(self, request: DrawnRequest) -> tuple[int | None, list[int]]:
        columns, first = self.columns(request)[0], self.accepted[self.place[request]] - 1
        window = self.slots.windows[columns[0], first : first + WINDOW]
        return int(self.slots.states[columns[first]]), window.tolist()

    def slots_of(self, request: DrawnRequest) -> set[int]:
        return set(self.columns(request)[0].tolist())


class ForgetsCountWithoutDrafts(PlainEngine):
    def count(self, step: DrawnStep) -> int:
        return super().count(step) if step.drafts else 1


class KeepsCountOfLastOwner(PlainEngine):
    def begin(self, request: DrawnRequest) -> None: ...


class ReadsRecycledState(PlainEngine):
    def run(self, steps: Sequence[DrawnStep], padding: int) -> None:
        for step in (step for step in steps if not step.request.done):
            self.slots.states[self.columns(step.request)[0, 0]] = 7
            step.request.done, done = 1, step.request.done
            super().run([step], padding)
            step.request.done = done
        super().run([step for step in steps if step.request.done], padding)


class KeepsWindowOfDrafts(PlainEngine):
    def held(self, request: DrawnRequest) -> tuple[int | None, list[int]]:
        state, _ = super().held(request)
        return state, self.slots.windows[self.columns(request)[0, 0], -WINDOW:].tolist()


class WritesSlotOfPadding(PlainEngine):
    def run(self, steps: Sequence[DrawnStep], padding: int) -> None:
        super().run(steps, padding)
        self.slots.states[0] += padding


class MovesTensor(PlainEngine):
    def run(self, steps: Sequence[DrawnStep], padding: int) -> None:
        super().run(steps, padding)
        self.moved.add("starts")


def report_of(engine: type[StateEngine]) -> Report:
    plays = {"mixed-graph": Play(MIXED, "graph")}
    kind = recurrent_backend(
        "Plain", __name__, "gated_delta", plays, lambda graphs: engine(), GraphSupport.UNIFORM_BATCH, "it has no graph"
    )
    return run(check_list(Subject(kind(), CPU, engine="plain 1", no_attention="a recurrence", families=("state",))))


def test_right_engine_passes_every_check() -> None:
    report = report_of(PlainEngine)
    assert {result.check: result.outcome for result in report.results} == dict.fromkeys(
        (SEQUENTIAL, OWN, ADDRESSES), Outcome.PASS
    )
    assert report.results[0].evidence["states"] > 100
    assert set(report.results[0].tags) == {"recurrence:gated_delta", "graph:capture"}
    assert report.claims["graph:capture"].level == "uniform batch"


@pytest.mark.parametrize(
    ("engine", "check"),
    [
        (ForgetsCountWithoutDrafts, SEQUENTIAL),
        (KeepsCountOfLastOwner, SEQUENTIAL),
        (ReadsRecycledState, SEQUENTIAL),
        (KeepsWindowOfDrafts, SEQUENTIAL),
        (WritesSlotOfPadding, OWN),
        (MovesTensor, ADDRESSES),
    ],
)
def test_wrong_engine_fails_its_check(engine: type[StateEngine], check: str) -> None:
    failed = {result.check for result in report_of(engine).results if result.outcome is Outcome.FAIL}
    assert failed == {check}


def test_rows_without_slot_or_tokens_are_skipped() -> None:
    slots = Slots(3, DRAFTS, null=0)
    before = slots.written()
    starts, tokens = torch.tensor([0, 2, 2]), [5, 6]
    slots.run(torch.tensor([0, 1]), starts, tokens)
    slots.slide(torch.tensor([0, 1]), starts, tokens)
    slots.run_drafts(torch.tensor([[0, 0], [1, 2]]), torch.tensor([1, 1]), starts, tokens)
    slots.slide_drafts(torch.tensor([0, 1]), torch.tensor([1, 1]), starts, tokens)
    assert torch.equal(slots.written(), before)
