"""Named attention specs and batch shapes that the checks run on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from attn_backends import AttentionBackend, Rejected
from builders import AttentionKind, AttentionSpec
from spec_decode.conformance.check import Subject, Unsupported

PAGE = 16
MAX_SEQ_LEN = 160
"""Token limit of the checks' requests: enough for several pages, splits and windows, quick in an interpreter."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Query and sequence lengths per live request, and the padded number of rows."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    rows: int

    @property
    def uniform(self) -> bool:
        return len(set(self.query_lens)) == 1


@dataclass(frozen=True, slots=True)
class Case:
    """A spec with a batch shape."""

    spec: AttentionSpec
    batch: Batch


DECODE = Batch((1, 1, 1, 1, 1), (1, 15, 16, 126, 142), 7)
"""One token each, before page edges and the 128 tokens that some kernels split at, with two padding rows."""
SINGLE = Batch((1,), (33,), 1)
VERIFY = Batch((5, 5, 5), (5, 37, 150), 4)
"""A uniform 1 + K, as step 0 and verification see it."""
RAGGED = Batch((3, 1, 20, 7), (3, 64, 20, 100), 4)
"""A prefill beside decodes."""


def base_spec(subject: Subject) -> AttentionSpec:
    """The plainest spec that the backend accepts: grouped and in fp32 where it has that."""
    dtypes = sorted(subject.backend.capabilities.dtypes, key=lambda dtype: -torch.finfo(dtype).bits)
    tried: list[str] = []
    for kind, dtype in product(subject.backend.capabilities.kinds, dtypes):
        for changes in _PLAIN[kind]:
            spec = AttentionSpec(kind=kind, dtype=dtype, **changes)
            verdict = subject.backend.supports(spec, subject.device)
            if not isinstance(verdict, Rejected):
                return spec
            tried += verdict.reasons
    raise Unsupported("; ".join(dict.fromkeys(tried)) or "claims no dtype, or no kind of attention")


_PLAIN: dict[AttentionKind, list[dict[str, Any]]] = {
    AttentionKind.MHA: [
        {"num_q_heads": heads, "num_kv_heads": 2, "page_size": page, "head_dim": dim}
        for heads, page, dim in product((4, 2), (PAGE, 64, 1), (64, 128))
    ],
    AttentionKind.MLA: [
        {"num_q_heads": heads, "num_kv_heads": 1, "page_size": page, "sliding_window": window, **dims}
        for dims, heads, page, window in product(
            ({"head_dim": 80, "value_dim": 64}, {"head_dim": 128}, {"head_dim": 512}),
            (4, 64),
            (PAGE, 64, 1),
            (None, 40),
        )
    ],
}
"""Specs to try, plainest first."""

_V4: dict[str, Any] = {
    "head_dim": 512,
    "value_dim": 512,
    "sliding_window": 128,
    "sinks": True,
    "dtype": torch.bfloat16,
    "page_size": 64,
}

_COMMON: dict[str, dict[str, Any]] = {
    "base": {},
    "window": {"sliding_window": 17},
    "window_1": {"sliding_window": 1},
    "soft_cap": {"soft_cap": 2.0},
    "sinks": {"sinks": True},
    "window_sinks_cap": {"sliding_window": 40, "sinks": True, "soft_cap": 8.0},
    "scale": {"scale": 0.3},
    "page_1": {"page_size": 1},
    "page_4": {"page_size": 4},
    "page_64": {"page_size": 64},
    "page_128": {"page_size": 128},
    "fp16": {"dtype": torch.float16},
    "bf16": {"dtype": torch.bfloat16},
    "fp32": {"dtype": torch.float32},
}
_VARIANTS: dict[AttentionKind, dict[str, dict[str, Any]]] = {
    AttentionKind.MHA: {
        **_COMMON,
        "gqa": {"num_q_heads": 4, "num_kv_heads": 1},
        "mha": {"num_q_heads": 2, "num_kv_heads": 2},
        "mqa": {"num_q_heads": 8, "num_kv_heads": 1},
        "wide_group": {"num_q_heads": 6, "num_kv_heads": 1},
        "dim_80": {"head_dim": 80},
        "dim_128": {"head_dim": 128},
        "dim_256": {"head_dim": 256},
        "value_dim": {"head_dim": 96, "value_dim": 64},
        "dims_192_and_128": {"head_dim": 192, "value_dim": 128},
        "dims_64_and_256": {"head_dim": 64, "value_dim": 256},
        "bf16_over_fp32_cache": {"dtype": torch.bfloat16, "kv_dtype": torch.float32},
        "fp8_cache": {"dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn},
        "fp8_cache_window": {"dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn, "sliding_window": 40},
    },
    AttentionKind.MLA: {
        **_COMMON,
        "window_sinks": {"sliding_window": 40, "sinks": True},
        "heads_1": {"num_q_heads": 1},
        "heads_20": {"num_q_heads": 20},
        "heads_128": {"num_q_heads": 128},
        "dims_128": {"head_dim": 128},
        "dims_256_and_64": {"head_dim": 320, "value_dim": 256},
        "deepseek_v3": {"num_q_heads": 16, "head_dim": 576, "value_dim": 512, "dtype": torch.bfloat16, "page_size": 64},
        "deepseek_v4": {**_V4, "num_q_heads": 64},
        "deepseek_v4_packed": {**_V4, "num_q_heads": 64, "kv_dtype": torch.float8_e4m3fn},
        "deepseek_v4_packed_page_1": {**_V4, "num_q_heads": 4, "kv_dtype": torch.float8_e4m3fn, "page_size": 1},
    },
}


def tested_values(field: str) -> list[int]:
    """The values of an int field of the spec that some variant of some kind has."""
    every = [change for kind in AttentionKind for change in (*_PLAIN[kind], *_VARIANTS[kind].values())]
    return sorted({change[field] for change in every if field in change})


def spec_cases(batches: dict[str, Batch]) -> Any:
    """A case generator: every spec variant with every batch. Refused variants stay in: the refusal is a result."""

    def generate(subject: Subject) -> Iterable[tuple[str, Case]]:
        for variant, spec in _specs(subject):
            for name, batch in batches.items():
                yield f"{variant}-{name}", Case(spec, batch)

    return generate


_TELLING = ("base", "window", "deepseek_v3", "deepseek_v4_packed")


def base_cases(batches: dict[str, Batch], variants: tuple[str, ...] = _TELLING) -> Any:
    """A case generator: a few telling variants with every batch."""

    def generate(subject: Subject) -> Iterable[tuple[str, Case]]:
        return [
            (f"{variant}-{name}", Case(spec, batch))
            for variant, spec in _specs(subject)
            if variant in variants
            for name, batch in batches.items()
        ]

    return generate


_PAGES = ("page_4", "page_64", "page_128")
"""Pages beside the plainest spec's, in order of size; each has an edge that DECODE's requests cross."""


def page_cases(batches: dict[str, Batch]) -> Any:
    """A case generator: the smallest and the largest of _PAGES that the backend serves, with every batch."""

    def generate(subject: Subject) -> Iterable[tuple[str, Case]]:
        plain = base_spec(subject).page_size
        served = [
            (variant, spec)
            for variant, spec in _specs(subject)
            if variant in _PAGES and spec.page_size != plain and subject.backend.supports(spec, subject.device)
        ]
        ends = dict([*served[:1], *served[-1:]])
        return [
            (f"{variant}-{name}", Case(spec, batch))
            for variant, spec in ends.items()
            for name, batch in batches.items()
        ]

    return generate


def joined(*generators: Any) -> Any:
    """A case generator: the cases of each in turn."""
    return lambda subject: [case for generate in generators for case in generate(subject)]


def _specs(subject: Subject) -> Iterable[tuple[str, AttentionSpec]]:
    """Every variant of the base spec, then those of the other kinds that the backend claims, named after the kind."""
    base = base_spec(subject)
    for variant, changes in _VARIANTS[base.kind].items():
        yield variant, _changed(base, changes)
    for kind in subject.backend.capabilities.kinds:
        if kind is not base.kind:
            plain = AttentionSpec(kind=kind, dtype=base.dtype, **_PLAIN[kind][0])
            for variant, changes in _VARIANTS[kind].items():
                yield f"{kind.value}_{variant}", _changed(plain, changes)


def _changed(spec: AttentionSpec, changes: dict[str, Any]) -> AttentionSpec:
    """The spec with these changes; what it derives from other fields is derived anew."""
    derived: dict[str, Any] = {"scale": None, "kv_dtype": None}
    if "head_dim" in changes:
        derived["value_dim"] = None
    return replace(spec, **{**derived, **changes})


def demand(backend: AttentionBackend, spec: AttentionSpec, device: torch.device) -> None:
    """Raise Unsupported with the backend's own reasons unless it accepts the spec."""
    verdict = backend.supports(spec, device)
    if isinstance(verdict, Rejected):
        raise Unsupported("; ".join(verdict.reasons))
