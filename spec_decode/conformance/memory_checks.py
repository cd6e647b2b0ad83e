"""Family builder: repeated rounds keep no memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from builders import AdvanceLevel, advance_state
from spec_decode.conformance.cases import spec_cases
from spec_decode.conformance.check import Family
from spec_decode.conformance.coverage import with_case
from spec_decode.testing import memory
from spec_decode.testing.batches import SINGLE, Case
from spec_decode.testing.outcome import CheckFailure, Measurements
from spec_decode.testing.paged_fixture import PagedFixture
from spec_decode.testing.subject import Subject

check = Family("builder", covers=with_case())

_WARM_UP = 4
_ROUNDS = 16
_RESIDENT_PER_ROUND = 64 << 10
"""Bytes: the resident set grows by pages and by allocator chunks, up to 330 KiB over these rounds."""


@dataclass(frozen=True, slots=True)
class _MemoryInUse:
    """Live tensors and the bytes of their storages, on every device, plus what the process holds."""

    tensors: int
    tensor_bytes: int
    system: memory.MemoryReading

    @classmethod
    def now(cls, device: torch.device) -> _MemoryInUse:
        system = memory.read(device)
        # Compare the type itself: isinstance() asks a proxy for its __class__, and some answer with a warning.
        alive = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.layout is torch.strided]
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in alive}
        return cls(len(alive), sum(storages.values()), system)

    def growth_since(self, before: _MemoryInUse) -> str:
        """Describe what grew over _ROUNDS rounds; empty if nothing did."""
        if self.tensors > before.tensors or self.tensor_bytes > before.tensor_bytes:
            return (
                f"{self.tensors - before.tensors} more tensors and {self.tensor_bytes - before.tensor_bytes} more "
                "bytes in tensors"
            )
        allocated = (self.system.allocated or 0) - (before.system.allocated or 0)
        if allocated > 0:
            return f"{allocated} more bytes allocated on the device, outside any tensor known to Python"
        resident = (self.system.resident or 0) - (before.system.resident or 0)
        if resident > _ROUNDS * _RESIDENT_PER_ROUND:
            return f"a resident set {resident} bytes larger, outside any tensor known to Python"
        return ""


@check(
    "repeated rounds leave memory use unchanged",
    spec_cases({"single": SINGLE}, ("base",)),
    since=(1, 1),
)
def rounds_keep_no_memory(subject: Subject, case: Case) -> Measurements:
    run = _round(subject, case)
    for _ in range(_WARM_UP):
        run()
    # A cache that fills or an arena that opens grows once; a leak grows again.
    if not _growth(subject.device, run) or not (grown := _growth(subject.device, run)):
        return {"rounds": float(_ROUNDS)}
    raise CheckFailure(
        contract=f"{_ROUNDS} equal rounds of build, advance and forward leave memory use unchanged, after {_WARM_UP} "
        f"to warm up and {_ROUNDS} in which it also grew",
        expected=f"no more tensors, and a resident set within {_RESIDENT_PER_ROUND >> 10} KiB per round",
        got=grown,
    )


def _growth(device: torch.device, run: Callable[[], None]) -> str:
    before = _MemoryInUse.now(device)
    for _ in range(_ROUNDS):
        run()
    return _MemoryInUse.now(device).growth_since(before)


def _round(subject: Subject, case: Case) -> Callable[[], None]:
    """Return a round over the same batch each time: build, advance if claimed, and attend."""
    fixture, batch = PagedFixture(subject, case.spec, case.batch.rows), case.batch
    buffers, builder = fixture.load(batch), fixture.builder()
    level = subject.backend.builder.advance_support(case.spec, subject.device).level
    query, key, value = fixture.inputs(batch, batch.seq_lens, fixture.queries(batch))

    def run() -> None:
        buffers.load(batch.query_lens, batch.seq_lens, pad_reqs=batch.rows)
        metadata = builder.build(fixture.view(buffers, batch), horizon=1)
        if level is AdvanceLevel.IN_GRAPH:
            advance_state(buffers, batch.rows)
            builder.advance(metadata)
        subject.backend.write_kv(key, value, fixture.cache, metadata)
        fixture.forward(query, metadata)

    return run
