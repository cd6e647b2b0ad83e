"""The attention and the batch of a check's case, as a report holds them."""

from __future__ import annotations

import msgspec
import torch

from builders import AttentionKind, AttentionSpec
from spec_decode.testing.batches import Batch, Case


class SpecRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of an AttentionSpec; value_dim, kv_dtype and scale are None if the spec derives them.

    Raises ValueError for fields that make no AttentionSpec.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    value_dim: int | None = None
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    sliding_window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    sinks: bool = False
    kind: AttentionKind = AttentionKind.MHA
    causal: bool = True
    batch_invariant: bool = False
    tree: bool = False
    head_scales: bool = False

    def __post_init__(self) -> None:
        self.spec()

    @classmethod
    def of(cls, spec: AttentionSpec) -> SpecRecord:
        """Record a spec; None for what it derives from other fields."""
        return cls(
            num_q_heads=spec.num_q_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            page_size=spec.page_size,
            value_dim=None if spec.out_dim == spec.head_dim else spec.out_dim,
            dtype=_name(spec.dtype),
            kv_dtype=None if spec.cache_dtype == spec.dtype else _name(spec.cache_dtype),
            sliding_window=spec.sliding_window,
            scale=None if spec.softmax_scale == spec.head_dim**-0.5 else spec.softmax_scale,
            soft_cap=spec.soft_cap,
            sinks=spec.sinks,
            kind=spec.kind,
            causal=spec.causal,
            batch_invariant=spec.batch_invariant,
            tree=spec.tree,
            head_scales=spec.head_scales,
        )

    def spec(self) -> AttentionSpec:
        """Return the spec."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        dtypes = {name: _dtype(fields[name]) for name in ("dtype", "kv_dtype") if fields[name] is not None}
        return AttentionSpec(**{**fields, **dtypes})


Range = tuple[int, int]
"""The smallest and the largest."""


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape of a batch. rows: live requests and padding rows. num_reqs: live requests. query_lens, seq_lens: over
    these requests. padding_tokens: query tokens behind the last request's. trees: whether query tokens form trees."""

    rows: int
    num_reqs: int
    query_lens: Range
    seq_lens: Range
    padding_tokens: int = 0
    trees: bool = False

    @classmethod
    def of(cls, batch: Batch) -> BatchRecord:
        """Record a batch."""
        return cls(
            rows=batch.rows,
            num_reqs=len(batch.seq_lens),
            query_lens=_range(batch.query_lens),
            seq_lens=_range(batch.seq_lens),
            padding_tokens=batch.num_tokens - sum(batch.query_lens),
            trees=bool(batch.trees),
        )


def records_of(value: object) -> tuple[SpecRecord | None, BatchRecord | None]:
    """Return the records of a check's case: both of a Case, the first of a spec, none of anything else."""
    if isinstance(value, Case):
        return SpecRecord.of(value.spec), BatchRecord.of(value.batch)
    return (SpecRecord.of(value) if isinstance(value, AttentionSpec) else None), None


def _range(lens: tuple[int, ...]) -> Range:
    return min(lens, default=0), max(lens, default=0)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch")
    return found
