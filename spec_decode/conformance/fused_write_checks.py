"""Family numerics: the fused writes that a backend declares."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from attn_backends import FP8_DS_MLA, FusedWrite, cache_layout
from attn_backends.kernels.rope import Rope, rope_formula
from attn_backends.kernels.write_latent import KvANormRope
from builders import AttentionKind
from spec_decode.conformance.cases import spec_cases
from spec_decode.conformance.check import Family
from spec_decode.conformance.coverage import column, with_case
from spec_decode.testing.batches import DECODE, MAX_SEQ_LEN, Case
from spec_decode.testing.built_batch import BuiltBatch
from spec_decode.testing.oracle import assert_as_precise
from spec_decode.testing.outcome import Measurements, expect, worst
from spec_decode.testing.paged_fixture import PagedFixture
from spec_decode.testing.subject import Subject

check = Family("numerics", covers=with_case())

_VARIANTS = ("base", "bf16", "fp8_cache", "deepseek_v3", "deepseek_v4_packed", "mla_base", "mla_bf16")
_EPS = 1e-6
_FACTOR = 4
"""Times the error of separate steps: truncation to bfloat16, as in Triton's interpreter, has twice that error."""


def _cases_of(write: FusedWrite, kind: AttentionKind) -> Callable[[Subject], Iterable[tuple[str, Case]]]:
    """Return cases of the attention kind that has this write; none for a backend that does not declare it."""
    generate = spec_cases({"decode": DECODE}, _VARIANTS)

    def cases(subject: Subject) -> Iterable[tuple[str, Case]]:
        declared = write in subject.backend.capabilities.fused_writes
        return [(name, case) for name, case in generate(subject) if case.spec.kind is kind] if declared else []

    return cases


@check(
    "rope_and_write_kv stores what a rotation and write_kv store, rotates the query, and leaves slots of -1 unwritten",
    _cases_of(FusedWrite.ROPE, AttentionKind.MHA),
    covers=with_case(column("fused_write", FusedWrite.ROPE)),
    since=(1, 1),
)
def fused_rope_write_stores_the_same(subject: Subject, case: Case) -> Measurements:
    fixture, backend = PagedFixture(subject, case.spec, case.batch.rows), _untyped(subject)
    metadata, slots, (query, key, value) = _batch_to_write(fixture, case)
    angles = _angles(case.spec.head_dim // 2)
    rope = Rope(_positions(fixture, len(query)), torch.cat([angles.cos(), angles.sin()], 1).float().to(fixture.device))

    def reference(x: torch.Tensor) -> torch.Tensor:
        first, second = x.double().cpu().chunk(2, -1)
        return torch.cat(_turned(first, second, angles[rope.positions.cpu()]), -1)

    separate = _stored_by(fixture, lambda: backend.write_kv(rope_formula(key, rope), value, fixture.cache, metadata))
    rotated = query.clone()
    fused = _stored_by(
        fixture, lambda: backend.rope_and_write_kv(rotated, key.clone(), value, rope, fixture.cache, metadata)
    )
    _expect_same_slots(fused[0], separate[0])
    expect(
        torch.equal(fused[1][slots], separate[1][slots]),
        contract="a fused write stores the values as write_kv does",
        expected="the same bits",
        got="a difference",
    )
    live = slice(len(slots))
    queries = rotated[live], rope_formula(query, rope)[live], reference(query)[live]
    keys = fused[0][slots], separate[0][slots], reference(key)[live]
    compared = {"the rotated queries": queries, "the rotated keys": keys}
    return worst(_assert_as_precise(*tensors, case, what) for what, tensors in compared.items())


@check(
    "norm_rope_and_write_latent stores what norm, rotation and write_kv store, and leaves slots of -1 unwritten",
    _cases_of(FusedWrite.KV_A_NORM_ROPE, AttentionKind.MLA),
    covers=with_case(column("fused_write", FusedWrite.KV_A_NORM_ROPE)),
    since=(1, 1),
)
def fused_latent_write_stores_the_same(subject: Subject, case: Case) -> Measurements:
    fixture, backend = PagedFixture(subject, case.spec, case.batch.rows), _untyped(subject)
    metadata, slots, (_, key, value) = _batch_to_write(fixture, case)
    dim, pairs = case.spec.head_dim, 32 if cache_layout(case.spec) is FP8_DS_MLA else 8
    angles = _angles(pairs)
    weight = (1 + torch.rand(dim, generator=fixture.generator)).to(case.spec.dtype)
    norm_rope = KvANormRope(
        weight=weight.to(fixture.device),
        eps=_EPS,
        positions=_positions(fixture, len(key)),
        table=torch.cat([angles.cos(), angles.sin()], 1).float().to(fixture.device),
    )
    latent = norm_rope.apply(key)
    separate = _stored_by(
        fixture, lambda: backend.write_kv(latent, latent[..., : value.shape[-1]], fixture.cache, metadata)
    )
    fused = _stored_by(
        fixture, lambda: backend.norm_rope_and_write_latent(key[:, 0].clone(), norm_rope, fixture.cache, metadata)
    )
    _expect_same_slots(fused[0], separate[0])
    wide = key.double().cpu()
    wide = wide / (wide.square().mean(-1, keepdim=True) + _EPS).sqrt() * weight.double()
    tail = wide[..., -2 * pairs :].unflatten(-1, (pairs, 2))
    turned = _turned(tail[..., 0], tail[..., 1], angles[norm_rope.positions.cpu()])
    reference = torch.cat([wide[..., : -2 * pairs], torch.stack(turned, -1).flatten(-2)], -1)
    wanted = "the normed and rotated latents"
    return _assert_as_precise(fused[0][slots], separate[0][slots], reference[: len(slots)], case, wanted)


def _assert_as_precise(
    fused: torch.Tensor, separate: torch.Tensor, reference: torch.Tensor, case: Case, expected: str
) -> Measurements:
    contract = "a fused write is as precise as its separate steps"
    return assert_as_precise(
        fused, separate, reference, case.spec, contract=contract, expected=expected, factor=_FACTOR
    )


def _untyped(subject: Subject) -> Any:
    """Return the backend as Any, to call the write methods that it declares."""
    return subject.backend


def _batch_to_write(
    fixture: PagedFixture, case: Case
) -> tuple[Any, torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return the batch's metadata, the slots of its live tokens, which come first, and (query, key, value)."""
    built = BuiltBatch(fixture, case.batch)
    slots = built.view().slot_mapping.cpu()
    inputs = fixture.inputs(case.batch, case.batch.seq_lens, fixture.queries(case.batch))
    return built.metadata, slots[: sum(case.batch.query_lens)], inputs


def _angles(pairs: int) -> torch.Tensor:
    """Return float64 [MAX_SEQ_LEN, pairs]: the rotation angle of each pair at each position."""
    return torch.arange(MAX_SEQ_LEN).double()[:, None] * 100.0 ** (-torch.arange(pairs).double() / pairs)


def _positions(fixture: PagedFixture, count: int) -> torch.Tensor:
    """Return int64 [count] on the device: an unordered position per token."""
    return (torch.arange(count, device=fixture.device) * 7 + 3) % MAX_SEQ_LEN


def _turned(first: torch.Tensor, second: torch.Tensor, angles: torch.Tensor) -> list[torch.Tensor]:
    """Rotate both halves [tokens, heads, pairs] of the pairs by angles [tokens, pairs]."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return [first * cos - second * sin, second * cos + first * sin]


def _stored_by(fixture: PagedFixture, write: Callable[[], None]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a write leaves in a fully poisoned cache; see `PagedFixture.stored`."""
    fixture.poison()
    write()
    return fixture.stored()


def _expect_same_slots(fused: torch.Tensor, separate: torch.Tensor) -> None:
    written, wanted = (~keys.isnan().flatten(1).all(1) for keys in (fused, separate))
    stray, missed = ((a & ~b).nonzero().flatten().tolist() for a, b in ((written, wanted), (wanted, written)))
    expect(
        not stray and not missed,
        contract="a fused write stores the tokens that have a slot and no others",
        expected="the slots that write_kv writes",
        got=f"slots {stray[:8]} written as well, slots {missed[:8]} not written",
    )
