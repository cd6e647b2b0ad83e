"""Time to move metadata one token forward: the shared kernel, each backend's own, and the step after it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from attn_backends import AttentionBackend, KVCache, get
from benchmarks.decode_fixture import DecodeFixture
from benchmarks.measure import kernels_in, time_call, time_in_turn, time_kernels
from benchmarks.rows import SEEN, Bench, BenchRow, serving, with_limits
from builders import AttentionSpec, BatchBuffers, BatchError, RequestTables, advance_state
from spec_decode.tools.specs import FP8_DS_MLA, GQA, MLA, SPARSE
from spec_decode.tools.timing_limit import TimingLimit

_PAGE = 16
_NUM_REQS = (1, 32)
_CONTEXT = 1024
_MOST = 4096
"""Capacity of a row of the shared state, in tokens: at its limit a row no longer advances, which costs less."""
_HORIZON = 7
_ONE_KERNEL = TimingLimit("kernels_per_step", 1)
_ADVANCE = TimingLimit("gpu_us", 3)
_REPLAN = TimingLimit("gpu_us", 4)


def advance_rows(bench: Bench) -> Iterator[BenchRow]:
    """Yield GPU time of one advance and the kernels it launches; a builder of views launches none."""
    with bench.noting("advance/shared"):
        yield from _shared_rows(bench)
    for backend, spec in serving(bench, "advance", (GQA, MLA, SPARSE, FP8_DS_MLA)):
        with bench.noting(f"advance/{backend.name}", at=f"[{spec.describe()}]"):
            for num_reqs in _NUM_REQS:
                yield _builder_row(bench, backend, spec, num_reqs)
    with bench.noting("advance/flashinfer-horizon"):
        for num_reqs in _NUM_REQS:
            yield _horizon_row(bench, num_reqs)


def step_rows(bench: Bench) -> Iterator[BenchRow]:
    """Yield FlashInfer's advance plus attention, planned on the device in each step and on the host once per round."""
    for name in ("flashinfer", "flashinfer-horizon"):
        with bench.noting(f"step/{name}"):
            if name == "flashinfer":
                backend = get(name)
            else:
                from benchmarks.flashinfer_plans import FlashInferHorizon

                backend = FlashInferHorizon()
            for num_reqs, context in product(_NUM_REQS, (1024, 8192)):
                yield _step_row(bench, backend, num_reqs, context)


def _shared_rows(bench: Bench) -> Iterator[BenchRow]:
    each = _MOST // _PAGE
    for num_groups, num_reqs in product((1, 4), (1, 32, 256)):
        sizes, counts = [_PAGE] * num_groups, [num_reqs * each] * num_groups
        tables = RequestTables(
            page_sizes=sizes, num_pages=counts, max_reqs=num_reqs, max_seq_len=_MOST, device=bench.device
        )
        pages = [list(range(r * each, (r + 1) * each)) for r in range(num_reqs)]
        tables.load([pages] * num_groups, [_MOST] * num_reqs)
        buffers = BatchBuffers(tables, max_tokens=num_reqs)
        buffers.load([1] * num_reqs, [_CONTEXT] * num_reqs)
        advance = partial(advance_state, buffers, num_reqs)
        shape = {"num_groups": num_groups, "num_reqs": num_reqs, "context": _CONTEXT}
        row = {"case": "advance", "backend": "shared", **shape}
        row |= {"gpu_us": time_kernels(advance), "kernels_per_step": kernels_in(advance)}
        if tables.overflow.any():
            raise BatchError(f"a row reached its limit of {_MOST} tokens while it was timed. Raise _MOST.")
        yield with_limits(row, _ONE_KERNEL, _ADVANCE)


def _builder_row(bench: Bench, backend: AttentionBackend, spec: AttentionSpec, num_reqs: int) -> BenchRow:
    fixture = DecodeFixture(spec, num_reqs, _CONTEXT, bench.device, horizon=_HORIZON)
    builder = fixture.builder(backend)
    advance = partial(builder.advance, builder.build(fixture.batch))
    advance()
    kernels = kernels_in(advance)
    gpu_us = time_kernels(advance) if kernels else None
    row = {**fixture.labels("advance", backend.name), "gpu_us": gpu_us, "kernels_per_step": kernels}
    if backend.name == "torch_reference":  # the specification is written for readability
        return row
    if not kernels:
        return with_limits(row, _ONE_KERNEL)
    return with_limits(row, _ONE_KERNEL, _REPLAN if backend.name.startswith("flashinfer") else _ADVANCE)


def _horizon_row(bench: Bench, num_reqs: int) -> BenchRow:
    """Time a step on the device and one plan() on the host."""
    from benchmarks.flashinfer_plans import FlashInferHorizon, HorizonBuilder

    fixture = DecodeFixture(GQA, num_reqs, _CONTEXT, bench.device, horizon=_HORIZON)
    backend = FlashInferHorizon()
    builder = fixture.builder(backend)
    assert isinstance(builder, HorizonBuilder)
    metadata = builder.build(fixture.batch)
    row = {
        **fixture.labels("advance", backend.name),
        "gpu_us": time_kernels(partial(builder.advance, metadata)),
        "host_us": time_call(partial(builder.plan, metadata), bench.device).host_us,
        "kernels_per_step": kernels_in(partial(builder.advance, metadata)),
    }
    return with_limits(row, _ONE_KERNEL, _ADVANCE)


def _step_row(bench: Bench, backend: AttentionBackend, num_reqs: int, context: int) -> BenchRow:
    fixture = DecodeFixture(GQA, num_reqs, context, bench.device, horizon=_HORIZON)
    builder = fixture.builder(backend)
    metadata = builder.build(fixture.batch)

    def step(cache: KVCache) -> torch.Tensor:
        builder.advance(metadata)
        return backend.forward(fixture.query, cache, metadata, spec=GQA)

    caches = fixture.caches(backend, cold=True)
    step(caches[0])
    return {
        **fixture.labels("step", backend.name),
        "gpu_us": time_in_turn(step, caches),
        "kernels_per_step": kernels_in(lambda: step(caches[0])),
        "floor_us": bench.floor_us(fixture.kv_bytes),
        "floor_counts": SEEN,
    }
