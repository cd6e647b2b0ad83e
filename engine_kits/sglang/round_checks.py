"""Family graph, for backends that plan every step of a round: its single graph, replanned and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch

from builders import HostLengths, advance_state
from engine_kits.records import record_of, tensors_in
from engine_kits.sglang.builder import PlannedStep, PlannedSteps
from engine_kits.sglang.stand_in import STEPS
from spec_decode.conformance.cases import base_cases, joined, page_cases
from spec_decode.conformance.check import Family
from spec_decode.conformance.coverage import ADVANCE, CAPTURE, with_case
from spec_decode.graphs import runtime_for
from spec_decode.testing.batches import Batch, Case
from spec_decode.testing.host_reads import expect_no_wait, refuse_host_reads
from spec_decode.testing.metadata_fields import expect_same_fields
from spec_decode.testing.outcome import Measurements, Unsupported, expect, worst
from spec_decode.testing.paged_fixture import PagedFixture
from spec_decode.testing.subject import Subject

check = Family("graph", covers=with_case(CAPTURE, ADVANCE))

_DRAFTED = STEPS - 1
"""Steps that attend: a round's last token is only sampled."""
_ROUND = Batch((1,) * 4, (2, 16, 62, 127), 5)
"""As the first step sees it. SGLang drafts after a prompt, so no request starts with a single token."""


def _cases(subject: Subject) -> Iterable[tuple[str, Any]]:
    """Return no cases for a backend that plans no steps: with this module loaded, the kit requests them for all."""
    rounds = joined(base_cases({"round": _ROUND}), page_cases({"round": _ROUND}))
    return rounds(subject) if issubclass(subject.backend.builder, PlannedSteps) else ()


_ROUNDS = {
    "as_large": _ROUND,
    "shrunk": Batch((1, 1), (31, 3), 5),
    "grown": Batch((1,) * 5, (12, 15, 64, 2, 150), 5),
}


class _CapturedRound:
    """A round's steps with their attention, captured the way SGLang captures them: over rows of padding."""

    def __init__(self, subject: Subject, case: Case) -> None:
        self.fixture = fixture = PagedFixture(subject, case.spec, case.batch.rows)
        self.rows, spec = case.batch.rows, case.spec
        self.buffers = fixture.load(Batch((1,), (2,), self.rows))
        self.builder = cast(PlannedSteps, fixture.builder())
        self.builder.plan_capture(self.rows)
        shape = (_DRAFTED, self.rows)
        self.query = torch.zeros(*shape, spec.num_q_heads, spec.head_dim, dtype=spec.dtype)
        self.key = torch.zeros(*shape, spec.num_kv_heads, spec.head_dim, dtype=spec.new_kv_dtype)
        self.value = torch.zeros(*shape, spec.num_kv_heads, spec.out_dim, dtype=spec.new_kv_dtype)
        self.out = torch.zeros(*shape, spec.num_q_heads, spec.out_dim, dtype=spec.dtype)
        self._run()
        self.builder.end_warm_up()
        self.graph = runtime_for(fixture.device).capture(self._run)

    def _run(self) -> None:
        fixture = self.fixture
        self.builder.begin(self.rows)
        # The graph keeps the metadata that the steps have at its capture.
        self.steps = [self.builder.step(self.rows, step) for step in range(_DRAFTED)]
        for i, step in enumerate(self.steps):
            fixture.subject.backend.write_kv(self.key[i], self.value[i], fixture.cache, step)
            if not fixture.subject.no_attention:
                self.out[i].copy_(fixture.forward(self.query[i], step))

    def replay(self, batch: Batch) -> tuple[list[list[int]], list[list[torch.Tensor]]]:
        """Plan another round and replay the graph over it; returns the lengths of each step, and its queries."""
        fixture = self.fixture
        fixture.replace_batch(self.buffers, batch)
        lengths = [[n + step for n in batch.seq_lens] for step in range(_DRAFTED)]
        queries = [fixture.queries(batch) for _ in lengths]
        for step, (lens, query) in enumerate(zip(lengths, queries, strict=True)):
            inputs = fixture.inputs(batch, lens, query)
            for target, source in zip((self.query, self.key, self.value), inputs, strict=True):
                target[step].copy_(source)
        self.out.fill_(float("nan"))
        self.builder.plan(fixture.view(self.buffers, batch))
        self.graph.replay()
        return lengths, queries


@dataclass(frozen=True, slots=True)
class _Step:
    """The observations of one step.

    where: the step and its round, as text. kernel_inputs, fresh: what its kernels read, and what those of a fresh round
    starting there read. slots, expected_slots: those of each request's text, from its kernels and from the kit's own
    tables. moved: tensors of the graph's metadata that the plan has moved.
    """

    where: str
    kernel_inputs: Any
    fresh: Any
    slots: list[list[int]]
    expected_slots: list[list[int]]
    moved: list[str]
    attended: Callable[[], Measurements]


@cache
def _observe(subject: Subject, case: Case) -> list[_Step]:
    """Capture the graph of a round once, and return the observations of every step of every round for the checks."""
    captured = _CapturedRound(subject, case)
    found: list[_Step] = []
    for name, batch in _ROUNDS.items():
        lengths, queries = captured.replay(batch)
        live, outs = len(batch.seq_lens), captured.out.clone()
        kernel_inputs = [_copied(step, live) for step in captured.steps]
        slots = [step.slots()[:live] for step in captured.steps]
        moved = [_moved(step) for step in captured.steps]
        for i, lens in enumerate(lengths):
            where = f"step {i} of a round over '{name}'"
            fresh = cast(PlannedSteps, captured.fixture.builder())
            attended = partial(captured.fixture.assert_within_budget, outs[i], lens, queries[i], contract=where)
            fresh_inputs = _copied(fresh.build(captured.fixture.view(captured.buffers, batch, lens)), live)
            expected_slots = [_slots_of(captured.fixture, request, length) for request, length in enumerate(lens)]
            found.append(_Step(where, kernel_inputs[i], fresh_inputs, slots[i], expected_slots, moved[i], attended))
            advance_state(captured.buffers, captured.rows)
        captured.fixture.expect_cache(lengths[-1], contract=f"writes of a round over '{name}'")
    return found


@check("the captured steps of a round, planned and replayed over other batches, attend right", _cases)
def planned_rounds_attend_right(subject: Subject, case: Case) -> Measurements:
    if why := subject.no_attention:
        raise Unsupported(f"no attention to check: {why}")
    return worst(step.attended() for step in _observe(subject, case))


@check(
    "after a plan and a replay over other batches, each step has every token before it, its own, and no other", _cases
)
def planned_steps_have_their_tokens(subject: Subject, case: Case) -> None:
    for step in _observe(subject, case):
        for request, (found, expected) in enumerate(zip(step.slots, step.expected_slots, strict=True)):
            expect(
                len(found) == len(expected),
                contract=f"{step.where}: request {request} has the tokens before the step and the step's own",
                expected=f"{len(expected)} tokens",
                got=f"{len(found)} tokens",
            )
            expect(
                found == expected,
                contract=f"{step.where}: request {request} has its own slots",
                expected=str(expected),
                got=found,
            )


@check("after a plan and a replay over other batches, each step is told what a round that begins there is told", _cases)
def planned_steps_mean_a_fresh_round(subject: Subject, case: Case) -> None:
    for step in _observe(subject, case):
        expect_same_fields(step.kernel_inputs, step.fresh, step.where)


@check("the plan of a replay writes where the captured graph reads", _cases)
def plans_keep_addresses(subject: Subject, case: Case) -> None:
    for step in _observe(subject, case):
        expect(
            not step.moved,
            contract=f"{step.where}: a graph reads the addresses of its capture",
            expected="the same tensors",
            got=f"{step.moved} replaced",
        )


@check("the plan of a replay waits for nothing of the device where SGLang is told no lengths on the host", _cases)
def plans_read_no_device(subject: Subject, case: Case) -> None:
    if (known := subject.backend.builder.host_lengths) is not HostLengths.NONE:
        raise Unsupported(f"the backend asks for lengths on the host: {known.value}")
    fixture = PagedFixture(subject, case.spec, case.batch.rows)
    view = fixture.view(fixture.load(case.batch), case.batch)
    builder = cast(PlannedSteps, fixture.builder())
    builder.plan_capture(case.batch.rows)
    with (
        expect_no_wait("the plan of a replay enqueues device work", "no wait"),
        refuse_host_reads(subject.device, [view.seq_lens, view.block_table]),
    ):
        builder.plan(view)


def _copied(step: PlannedStep, live: int) -> Any:
    return record_of({what: tensor.clone() for what, tensor in step.kernel_inputs(live).items()})


def _slots_of(fixture: PagedFixture, request: int, length: int) -> list[int]:
    """Return a request's slots; the padding page comes first."""
    size, pages = fixture.spec.page_size, fixture.pages[request]
    first = max(0, length - (fixture.spec.sliding_window or length))
    return [(pages[position // size] + 1) * size + position % size for position in range(first, length)]


def _moved(step: PlannedStep) -> list[str]:
    if type(step.metadata) is not type(step.planned()):
        return []  # the graph makes its own from the plan
    held, planned = tensors_in(step.metadata), tensors_in(step.planned())
    return [what for what in held if what not in planned or held[what].data_ptr() != planned[what].data_ptr()]
