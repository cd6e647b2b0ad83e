"""Families builder and numerics: how often, from which thread and under which defaults a backend is called changes
nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from builders import AdvanceLevel, MetadataBuilder, advance_state
from builders.devices import on_device
from spec_decode.conformance.cases import base_cases, spec_cases
from spec_decode.conformance.check import Family
from spec_decode.conformance.coverage import ADVANCE, with_case
from spec_decode.conformance.draft_runs import without_interpreter
from spec_decode.testing.batches import DECODE, SINGLE, Case
from spec_decode.testing.built_batch import BuiltBatch
from spec_decode.testing.error_location import error_location
from spec_decode.testing.metadata_fields import expect_same_fields, memory_layouts_of, moved_since
from spec_decode.testing.outcome import CheckFailure, Measurements, expect
from spec_decode.testing.paged_fixture import PagedFixture
from spec_decode.testing.poison import bits
from spec_decode.testing.subject import Subject

builder = Family("builder", covers=with_case())
numerics = Family("numerics", covers=with_case())

_MANY = 3_100
"""More than the round numbers of calls after which a backend may do something else: 100, 1,000, 1,024, 2,048, 3,000."""
_KEPT = 8
"""Outputs that a caller keeps while it goes on."""
_SINGLE = spec_cases({"single": SINGLE}, ("base",))


@builder(
    f"advance number {_MANY:,} refreshes metadata as the first one does",
    _SINGLE,
    covers=with_case(ADVANCE),
    advances=True,
    since=(1, 2),
)
@without_interpreter
def advances_go_on(subject: Subject, case: Case) -> None:
    built = BuiltBatch.of(subject, case, horizon=1)
    # With no state moved in between, each call leaves the metadata unchanged.
    for _ in range(_MANY - 1):
        built.builder.advance(built.metadata)
    built.advance()
    expect_same_fields(built.metadata, built.fresh(), f"advance number {_MANY:,}")


@builder(f"build number {_MANY:,} of a batch shape has the addresses of the first, and is as right", _SINGLE)
@without_interpreter
def builds_go_on(subject: Subject, case: Case) -> Measurements:
    built = BuiltBatch.of(subject, case)
    view, first = built.view(), memory_layouts_of(built.metadata)
    for number in range(2, _MANY + 1):
        rebuilt = built.builder.build(view)
        moved = moved_since(first, rebuilt)
        expect(
            not moved,
            contract="a rebuild writes into the buffers that a graph was captured with",
            expected="the same addresses in every build",
            got=f"{moved} moved in build number {number:,}",
        )
    expect_same_fields(rebuilt, built.fresh(), f"build number {_MANY:,}")
    return {} if subject.no_attention else built.expect_attention("attention of the last build", metadata=rebuilt)


@numerics(f"the output of {_MANY:,} equal calls is the same, and each call returns a tensor of its own", _SINGLE)
@without_interpreter
def forwards_go_on(subject: Subject, case: Case) -> None:
    fixture = PagedFixture(subject, case.spec, case.batch.rows)
    metadata = BuiltBatch(fixture, case.batch).metadata
    query, key, value = fixture.inputs(case.batch, case.batch.seq_lens, fixture.queries(case.batch))
    subject.backend.write_kv(key, value, fixture.cache, metadata)
    kept = [fixture.forward(query, metadata) for _ in range(_KEPT)]
    first = bits(kept[0]).clone()
    differing = torch.zeros((), dtype=torch.int64, device=fixture.device)
    for _ in range(_MANY - _KEPT):
        differing += (bits(fixture.forward(query, metadata)) != first).any()
    # Another query, so that a buffer that is used again does not hold the same numbers again.
    for _ in range(_KEPT):
        fixture.forward(query.flip(-1), metadata)
    changed = [index + 1 for index, out in enumerate(kept) if not torch.equal(bits(out), first)]
    expect(
        not differing and not changed,
        contract="an equal call has an equal output, and a later call changes no earlier output",
        expected=f"the bits of the first output in {_MANY:,} calls",
        got=f"{int(differing)} other outputs; outputs {changed} changed after they were returned",
    )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _in_a_thread(run: Callable[[], None], device: torch.device) -> None:
    """Run it in a thread of its own, in this one's inference mode, and raise what it raises."""
    inference = torch.is_inference_mode_enabled()

    def run_there() -> None:
        with on_device(device), torch.inference_mode(inference):
            run()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(run_there).result()


def _around(device: torch.device) -> dict[str, Callable[[Callable[[], None]], None]]:
    """Return ways to run a function, by what a caller did."""

    def within(context: Callable[[], object]) -> Callable[[Callable[[], None]], None]:
        def runs(run: Callable[[], None]) -> None:
            with context():  # type: ignore[attr-defined]
                run()

        return runs

    # As `torch.set_default_device("cuda")` does; on a CPU there is no other device.
    own_device = {"with its device as torch's default": within(lambda: device)} if device.type == "cuda" else {}
    return {
        **own_device,
        "in another thread": lambda run: _in_a_thread(run, device),
        "with float64 as torch's default dtype": within(lambda: _default_dtype(torch.float64)),
        "with bfloat16 as torch's default dtype": within(lambda: _default_dtype(torch.bfloat16)),
        "with float16 as torch's default dtype": within(lambda: _default_dtype(torch.float16)),
        "with gradients enabled": within(torch.enable_grad),
        "in inference mode": within(torch.inference_mode),
    }


@numerics(
    "outputs depend neither on the calling thread nor on torch's defaults",
    base_cases({"decode": DECODE}),
)
def surroundings_change_nothing(subject: Subject, case: Case) -> None:
    plain = _step_by_step(subject, case, lambda run: run())
    for what, around in _around(subject.device).items():
        contract, expected = "the caller's thread and torch's defaults change no output", f"the same bits {what}"
        try:
            found = _step_by_step(subject, case, around)
        except CheckFailure:
            raise
        except Exception as error:  # a backend can fail in any way; without `what` nobody could tell why
            got = f"{type(error).__name__}: {error}{error_location(error)}"
            raise CheckFailure(contract=contract, expected=expected, got=got) from error
        differing = sum(int((bits(a) != bits(b)).sum()) for a, b in zip(found, plain, strict=True))
        expect(differing == 0, contract=contract, expected=expected, got=f"{differing} elements differ")


def _step_by_step(subject: Subject, case: Case, around: Callable[[Callable[[], None]], None]) -> list[torch.Tensor]:
    """Return the outputs of a build and, if it is claimed, of an advance; `around` runs all calls of the backend."""
    fixture = PagedFixture(subject, case.spec, case.batch.rows)
    buffers, queries = fixture.load(case.batch), fixture.queries(case.batch)
    view = fixture.view(buffers, case.batch)
    advances = subject.backend.builder.advance_support(case.spec, subject.device).level is AdvanceLevel.IN_GRAPH
    found: list[torch.Tensor] = []
    made: list[tuple[MetadataBuilder[Any], Any]] = []

    def attend(inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        query, key, value = inputs
        subject.backend.write_kv(key, value, fixture.cache, made[0][1])
        found.append(fixture.forward(query, made[0][1]))

    def build() -> None:
        own = fixture.builder()
        made.append((own, own.build(view, horizon=int(advances))))
        attend(first)

    def advance() -> None:
        own, metadata = made[0]
        own.advance(metadata)
        attend(second)

    lens = case.batch.seq_lens
    first, second = (fixture.inputs(case.batch, [n + step for n in lens], queries) for step in (0, 1))
    around(build)
    if advances:
        advance_state(buffers, case.batch.rows)
        around(advance)
    return [out.detach().clone() for out in found]
