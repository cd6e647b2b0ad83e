"""Families numerics and refusal: the scales of an 8-bit cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from attn_backends import KVCache, KVScales
from builders import BatchError
from spec_decode.conformance.cases import spec_cases
from spec_decode.conformance.check import Family
from spec_decode.conformance.coverage import REFUSALS, only, with_case
from spec_decode.testing.batches import DECODE, Case
from spec_decode.testing.built_batch import BuiltBatch
from spec_decode.testing.outcome import CheckFailure, expect
from spec_decode.testing.paged_fixture import PagedFixture
from spec_decode.testing.poison import bits
from spec_decode.testing.subject import Subject

_SCALED = spec_cases({"decode": DECODE}, ("fp8_cache", "fp8_cache_head_scales"))
_LARGEST = 448.0
_NEAR = 1 + 2**-12
"""A kernel can multiply by the inverse of a scale, and then takes the other of two nearly equally near numbers."""

numerics = Family("numerics", covers=with_case())
check = Family("refusal", covers=only(REFUSALS))


@numerics(
    "write_kv stores keys and values over their scales: the nearest number in 8 bits, 448 beyond it, and NaN for NaN",
    _SCALED,
    since=(1, 3),
)
def writes_round_and_saturate(subject: Subject, case: Case) -> None:
    fixture = PagedFixture(subject, case.spec, case.batch.rows)
    built = BuiltBatch(fixture, case.batch)
    live = sum(case.batch.query_lens)
    slots = built.view().slot_mapping[:live].cpu()
    scales = fixture.key_scales, fixture.value_scales
    key, value = (_numbers(part, by) for part, by in zip(_parts(fixture, case), scales, strict=True))
    subject.backend.write_kv(key.to(fixture.device), value.to(fixture.device), fixture.cache, built.metadata)
    for name, part, stored, by in zip(("key", "value"), (key, value), _bytes_at(fixture, slots), scales, strict=True):
        wanted = part[:live].double() / torch.tensor(by).double()[:, None]
        _expect_nearest(name, wanted, stored.float().double())


def _parts(fixture: PagedFixture, case: Case) -> list[torch.Tensor]:
    """Return normal numbers in place of new keys and values."""
    spec, tokens = case.spec, case.batch.num_tokens
    shapes = ((tokens, spec.num_kv_heads, dim) for dim in (spec.head_dim, spec.out_dim))
    return [torch.randn(shape, generator=fixture.generator) for shape in shapes]


def _numbers(part: torch.Tensor, scales: Sequence[float]) -> torch.Tensor:
    """Spread numbers over all that e4m3 has and beyond, in bfloat16; each head has both ends, infinity and NaN."""
    spread = part * torch.logspace(-4, 3, part.shape[-1]) * torch.tensor(scales)[:, None]
    ends = torch.tensor([math.nan, math.inf, -math.inf, 449.0, -1e4, 2.0**-9])
    spread[..., : len(ends)] = ends * torch.tensor(scales)[:, None]
    return spread.bfloat16()


def _bytes_at(fixture: PagedFixture, slots: torch.Tensor) -> list[torch.Tensor]:
    size, cache = fixture.spec.page_size, fixture.cache
    return [bits(part).cpu()[slots // size, slots % size].view(part.dtype) for part in (cache.key, cache.value)]


def _expect_nearest(name: str, wanted: torch.Tensor, stored: torch.Tensor) -> None:
    """Raise CheckFailure unless each stored number is one of the nearest in 8 bits to what is wanted."""
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float().double()
    codes = codes[codes.isfinite()].unique()
    within = wanted.clamp(-_LARGEST, _LARGEST)
    nearest = (within[..., None].nan_to_num() - codes).abs().amin(-1)
    right = torch.where(wanted.isnan(), stored.isnan(), (stored - within).abs() <= nearest * _NEAR + 1e-6)
    if right.all():
        return
    at = tuple((~right).nonzero()[0].tolist())
    expect(
        False,
        contract=f"a {name} over its scale is rounded to nearest, clamped to 448, and NaN if it is NaN",
        expected=f"the nearest to {wanted[at].item():g}",
        got=f"{stored[at].item():g}, and {int((~right).sum())} wrong numbers of {right.numel():,}",
    )


@check("scales that are missing, or of another shape, dtype or device, are rejected", _SCALED, since=(1, 3))
def bad_scales_never_reach_a_kernel(subject: Subject, case: Case) -> None:
    spec, fixture = case.spec, PagedFixture(subject, case.spec, case.batch.rows)
    built = BuiltBatch(fixture, case.batch)
    query, key, value = fixture.inputs(case.batch, case.batch.seq_lens, fixture.queries(case.batch))
    before = [bits(part).clone() for part in (fixture.cache.key, fixture.cache.value)]

    def forward(cache: KVCache) -> None:
        subject.backend.forward(query, cache, built.metadata, spec=spec)

    def write_kv(cache: KVCache) -> None:
        subject.backend.write_kv(key, value, cache, built.metadata)

    for what, cache in _misfits(fixture.cache):
        _expect_refusal(forward, cache, f"forward() with {what}")
        _expect_refusal(write_kv, cache, f"write_kv() with {what}")
    after = [bits(part) for part in (fixture.cache.key, fixture.cache.value)]
    unchanged = all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    expect(unchanged, contract="a refused write writes nothing", expected="the same bytes", got="others")


def _expect_refusal(call: Callable[[KVCache], None], cache: KVCache, got: str) -> None:
    """Call it with the cache. Raises CheckFailure unless that raises BatchError."""
    try:
        call(cache)
    except BatchError:
        return
    raise CheckFailure(contract="bad scales never reach a kernel", expected="BatchError", got=got)


def _misfits(cache: KVCache) -> Iterator[tuple[str, KVCache]]:
    scales = cache.scales
    assert scales is not None
    yield "no scales", replace(cache, scales=None)
    for name in ("key", "value"):
        scale: torch.Tensor = getattr(scales, name)
        for what, wrong in {
            "one more scale than heads": scale.new_ones(cache.key.shape[2] + 1),
            "scales in two dims": scale[:, None],
            "float64": scale.double(),
            "another device": scale.to("meta"),
        }.items():
            parts = {"key": scales.key, "value": scales.value, name: wrong}
            own = KVScales(parts["key"], parts["value"], scales.key_floats, scales.value_floats)
            yield f"{what} for each {name}", replace(cache, scales=own)
