"""Family refusal: what is not claimed is refused, with every reason, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from attn_backends import Feature, Rejected
from builders import AttentionKind, AttentionSpec, BatchError
from spec_decode.conformance.cases import DECODE, Case, base_cases, base_spec
from spec_decode.conformance.check import CheckFailure, Subject, check, expect
from spec_decode.testing.paged_fixture import PagedFixture


def _unclaimed(subject: Subject) -> Iterable[tuple[str, AttentionSpec]]:
    """Specs outside the capability record, each wrong in one way."""
    claims, base = subject.backend.capabilities, base_spec(subject)
    yield "float64", replace(base, dtype=torch.float64, kv_dtype=torch.float64)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        if dtype not in claims.dtypes:
            yield str(dtype).removeprefix("torch."), replace(base, dtype=dtype, kv_dtype=dtype)
    for size in (3, 7, 48, 8192):
        if size not in claims.page_sizes:
            yield f"page_{size}", replace(base, page_size=size)
    for dim in (8, 65, 512, 4096):
        if dim not in claims.head_dims:
            yield f"dim_{dim}", replace(base, head_dim=dim, value_dim=dim)
    features = {
        Feature.SLIDING_WINDOW: {"sliding_window": 8},
        Feature.SOFT_CAP: {"soft_cap": 5.0},
        Feature.SINKS: {"sinks": True},
        Feature.VALUE_DIM: {"head_dim": 128, "value_dim": 64},
    }
    for feature, change in features.items():
        if feature not in claims.features:
            yield feature.value, replace(base, **change)  # type: ignore[arg-type]
    for feature, lack in {Feature.SLIDING_WINDOW: {"sliding_window": None}, Feature.SINKS: {"sinks": False}}.items():
        if feature in claims.required:
            yield f"without_{feature.value}", replace(base, **lack)  # type: ignore[arg-type]
    for kind in AttentionKind:
        if kind not in claims.kinds:
            yield kind.value, replace(base, kind=kind, num_kv_heads=1)


@check("refusal.unclaimed_is_refused", "a spec outside the capability record is refused with reasons", _unclaimed)
def unclaimed_is_refused(subject: Subject, spec: AttentionSpec) -> None:
    verdict = subject.backend.supports(spec, subject.device)
    expect(
        isinstance(verdict, Rejected) and len(verdict.reasons) > 0 and all(len(r) > 8 for r in verdict.reasons),
        contract="what is not claimed is refused in words",
        expected=f"Rejected(reasons) for [{spec.describe()}]",
        got=verdict,
    )


@check("refusal.all_reasons_at_once", "a spec that is wrong in several ways is refused with every reason")
def all_reasons_at_once(subject: Subject, case: None) -> None:
    spec = replace(base_spec(subject), dtype=torch.float64, kv_dtype=torch.float64)
    verdict = subject.backend.supports(spec, torch.device("meta"))
    count = len(verdict.reasons) if isinstance(verdict, Rejected) else 0
    expect(count >= 3, contract="all reasons at once", expected="device, dtype and kv_dtype named", got=verdict)


def _bad_inputs(subject: Subject) -> Iterable[tuple[str, Callable[[PagedFixture], dict[str, torch.Tensor]]]]:
    yield "query_dtype", lambda w: {"query": _query(w).double()}
    yield "query_shape", lambda w: {"query": _query(w)[:, :-1]}
    yield "query_rows", lambda w: {"query": _query(w)[:-1]}
    yield "cache_dtype", lambda w: {"query": _query(w), "key": w.cache.key.double()}
    yield "cache_heads", lambda w: {"query": _query(w), "value": w.cache.value[:, :, :-1]}
    yield "cache_stride", lambda w: {"query": _query(w), "key": torch.stack([w.cache.key] * 2, -1)[..., 0]}
    yield "sinks_unasked", lambda w: {"query": _query(w), "sinks": torch.zeros(4, device=w.device)}


def _query(world: PagedFixture) -> torch.Tensor:
    return torch.zeros(
        DECODE.rows, world.spec.num_q_heads, world.spec.head_dim, dtype=world.spec.dtype, device=world.device
    )


@check(
    "refusal.bad_tensors_never_reach_a_kernel",
    "tensors of another shape, dtype or stride are refused",
    _bad_inputs,
)
def bad_tensors_never_reach_a_kernel(subject: Subject, make: Callable[[PagedFixture], dict[str, torch.Tensor]]) -> None:
    world = PagedFixture(subject, base_spec(subject), DECODE.rows)
    metadata = world.builder().build(world.view(world.load(DECODE), DECODE))
    inputs = make(world)
    cache = type(world.cache)(inputs.get("key", world.cache.key), inputs.get("value", world.cache.value))
    try:
        subject.backend.forward(inputs["query"], cache, metadata, spec=world.spec, sinks=inputs.get("sinks"))
    except BatchError:
        return
    raise CheckFailure(
        contract="bad input never reaches a kernel",
        expected="BatchError before anything runs",
        got="a result",
    )


@check(
    "refusal.bad_writes_never_reach_a_kernel",
    "keys and values of another shape or dtype are refused and the cache stays as it was",
    base_cases({"decode": DECODE}, ("base",)),
)
def bad_writes_never_reach_a_kernel(subject: Subject, case: Case) -> None:
    world = PagedFixture(subject, case.spec, DECODE.rows)
    metadata = world.builder().build(world.view(world.load(DECODE), DECODE))
    good = torch.zeros(
        DECODE.rows,
        case.spec.num_kv_heads,
        case.spec.head_dim,
        dtype=case.spec.new_kv_dtype,
        device=world.device,
    )
    value = good[..., : case.spec.out_dim]
    for bad in (good.double(), good[:-1], torch.cat([good, good], 1), good[..., :-1]):
        try:
            subject.backend.write_kv(bad, value, world.cache, metadata)
        except BatchError:
            continue
        raise CheckFailure(contract="bad input is refused", expected="BatchError", got=f"a write of {tuple(bad.shape)}")
    world.expect_cache([n - 1 for n in DECODE.seq_lens], contract="a refused write changes nothing")
