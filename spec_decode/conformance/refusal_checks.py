"""Family refusal: specs that are not claimed are rejected with every reason, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from attn_backends import Feature, Rejected
from builders import AttentionKind, AttentionSpec, BatchError
from spec_decode.conformance.cases import spec_cases
from spec_decode.conformance.check import Family
from spec_decode.conformance.coverage import REFUSALS, only
from spec_decode.conformance.drawn_cases import unserved_claims
from spec_decode.testing.batches import DECODE, Case, with_trees
from spec_decode.testing.built_batch import BuiltBatch
from spec_decode.testing.outcome import CheckFailure, expect
from spec_decode.testing.paged_fixture import PagedFixture
from spec_decode.testing.subject import Subject

check = Family("refusal", covers=only(REFUSALS))


def _unclaimed(subject: Subject) -> Iterable[tuple[str, AttentionSpec]]:
    """Yield specs outside the capability record, each wrong in one way."""
    claims, base = subject.backend.capabilities, subject.base_spec()
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
        Feature.SLIDING_WINDOW: replace(base, sliding_window=8),
        Feature.SOFT_CAP: replace(base, soft_cap=5.0),
        Feature.SINKS: replace(base, sinks=True),
        Feature.VALUE_DIM: replace(base, head_dim=128, value_dim=64),
        Feature.BATCH_INVARIANT: replace(base, batch_invariant=True),
        Feature.NON_CAUSAL: replace(base, causal=False),
        Feature.TREE: with_trees(base),
        Feature.HEAD_SCALES: replace(base, kind=AttentionKind.MHA, kv_dtype=torch.float8_e4m3fn, head_scales=True),
    }
    yield from ((feature.value, spec) for feature, spec in features.items() if feature not in claims.features)
    without = {Feature.SLIDING_WINDOW: replace(base, sliding_window=None), Feature.SINKS: replace(base, sinks=False)}
    yield from ((f"without_{feature.value}", spec) for feature, spec in without.items() if feature in claims.required)
    for kind in AttentionKind:
        if kind not in claims.kinds:
            yield kind.value, replace(base, kind=kind, num_kv_heads=1)


@check("a spec outside the capability record is rejected with reasons", _unclaimed)
def unclaimed_is_refused(subject: Subject, spec: AttentionSpec) -> None:
    answer = subject.backend.supports(spec, subject.device)
    expect(
        isinstance(answer, Rejected) and len(answer.reasons) > 0 and all(len(r) > 8 for r in answer.reasons),
        contract="an unclaimed spec is rejected with reasons",
        expected=f"Rejected(reasons) for [{spec.describe()}]",
        got=answer,
    )


@check("everything that the capability record claims is served with some spec")
def claims_are_served(subject: Subject, case: None) -> None:
    unserved = unserved_claims(subject)
    expect(
        not unserved,
        contract="a backend claims what it serves: unsupported_reasons() is for what only some combinations lack",
        expected="a spec that is accepted for every value in the capability record",
        got=f"none for {'; '.join(unserved)}",
    )


@check("a spec that is wrong in several ways is rejected with every reason")
def all_reasons_at_once(subject: Subject, case: None) -> None:
    spec = replace(subject.base_spec(), dtype=torch.float64, kv_dtype=torch.float64)
    answer = subject.backend.supports(spec, torch.device("meta"))
    count = len(answer.reasons) if isinstance(answer, Rejected) else 0
    expect(count >= 3, contract="all reasons at once", expected="device, dtype and kv_dtype named", got=answer)


def _bad_inputs(subject: Subject) -> Iterable[tuple[str, Callable[[PagedFixture], dict[str, torch.Tensor]]]]:
    yield "query_dtype", lambda f: {"query": _query(f).double()}
    yield "query_shape", lambda f: {"query": _query(f)[:, :-1]}
    yield "query_rows", lambda f: {"query": _query(f)[:-1]}
    yield "cache_dtype", lambda f: {"query": _query(f), "key": f.cache.key.double()}
    yield "cache_heads", lambda f: {"query": _query(f), "value": f.cache.value[:, :, :-1]}
    yield "cache_stride", lambda f: {"query": _query(f), "key": torch.stack([f.cache.key] * 2, -1)[..., 0]}
    yield "sinks_unasked", lambda f: {"query": _query(f), "sinks": torch.zeros(4, device=f.device)}


def _query(fixture: PagedFixture) -> torch.Tensor:
    spec = fixture.spec
    return torch.zeros(DECODE.rows, spec.num_q_heads, spec.head_dim, dtype=spec.dtype, device=fixture.device)


@check("tensors of another shape, dtype or stride are rejected", _bad_inputs)
def bad_tensors_never_reach_a_kernel(subject: Subject, make: Callable[[PagedFixture], dict[str, torch.Tensor]]) -> None:
    fixture = PagedFixture(subject, subject.base_spec(), DECODE.rows)
    metadata = BuiltBatch(fixture, DECODE).metadata
    inputs = make(fixture)
    cache = type(fixture.cache)(inputs.get("key", fixture.cache.key), inputs.get("value", fixture.cache.value))
    try:
        subject.backend.forward(inputs["query"], cache, metadata, spec=fixture.spec, sinks=inputs.get("sinks"))
    except BatchError:
        return
    raise CheckFailure(
        contract="bad input never reaches a kernel", expected="BatchError before anything runs", got="a result"
    )


@check(
    "keys and values of another shape or dtype are rejected and the cache stays unchanged",
    spec_cases({"decode": DECODE}, ("base",)),
)
def bad_writes_never_reach_a_kernel(subject: Subject, case: Case) -> None:
    spec, fixture = case.spec, PagedFixture(subject, case.spec, DECODE.rows)
    metadata = BuiltBatch(fixture, DECODE).metadata
    good = torch.zeros(DECODE.rows, spec.num_kv_heads, spec.head_dim, dtype=spec.new_kv_dtype, device=fixture.device)
    value = good[..., : spec.out_dim]
    bad = [(key, value) for key in _misfits(good)]
    # If values are stored inside the keys, no values are written.
    bad += [] if fixture.cache.latent else [(good, other) for other in _misfits(value)]
    for key, other in bad:
        try:
            subject.backend.write_kv(key, other, fixture.cache, metadata)
        except BatchError:
            continue
        got = f"a write of keys {list(key.shape)} in {key.dtype} and values {list(other.shape)} in {other.dtype}"
        raise CheckFailure(contract="bad input is rejected", expected="BatchError", got=got)
    fixture.expect_cache([n - 1 for n in DECODE.seq_lens], contract="a rejected write changes nothing")


def _misfits(good: torch.Tensor) -> list[torch.Tensor]:
    """Return keys or values with another dtype, fewer tokens, more heads, and fewer dims."""
    return [good.double(), good[:-1], torch.cat([good, good], 1), good[..., :-1]]
