"""Named attention specs that the checks run on, each with named batch shapes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from builders import AttentionKind, AttentionSpec
from spec_decode.conformance.check import Cases
from spec_decode.testing.batches import Batch, Case
from spec_decode.testing.subject import PLAIN_SPECS, Subject, plain_specs

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
    "batch_invariant": {"batch_invariant": True},
    "batch_invariant_window": {"batch_invariant": True, "sliding_window": 40},
}
_VARIANTS: dict[AttentionKind, dict[str, dict[str, Any]]] = {
    AttentionKind.MHA: {
        **_COMMON,
        "gqa": {"num_q_heads": 4, "num_kv_heads": 1},
        "mha": {"num_q_heads": 2, "num_kv_heads": 2},
        "mqa": {"num_q_heads": 8, "num_kv_heads": 1},
        "kv_heads_5": {"num_q_heads": 10, "num_kv_heads": 5},
        "kv_heads_8": {"num_q_heads": 32, "num_kv_heads": 8},
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
        "fp8_cache_head_scales": {"dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn, "head_scales": True},
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
_ROWS = Batch((1,) * 96, tuple(1 + 7 * row % 40 for row in range(96)), 96)
_LONG = Batch((1, 1), (4099, 2051), 2)
"""Lengths that fp16 cannot represent; the first spans more than 64 splits of 64 tokens."""
_SHORT = Batch((1, 1, 1), (1, 24, 49), 4)
TELLING_VARIANTS = ("base", "bf16", "sinks", "soft_cap", "scale", "page_1", "page_64", "dim_128", "deepseek_v3")
"""The variants on which every block and tree shape is checked."""
_FAR_PAGES = 33_000
"""Pages of a pool whose last ids do not fit into 15 bits."""
SCALE_OF_LOW_SCORES = 3e4
_EDGES: dict[str, tuple[dict[str, Any], Batch]] = {
    "rows_96": ({}, _ROWS),
    "rows_260": ({}, Batch((1,) * 260, tuple(1 + row % 3 for row in range(260)), 260)),
    "length_4099": ({}, _LONG),
    # More tokens than 16 bits count.
    "length_66001": ({"num_q_heads": 1, "num_kv_heads": 1}, Batch((1,), (66_001,), 1)),
    "sinks_4099": ({"sinks": True}, _LONG),
    "soft_cap_4099": ({"soft_cap": 2.0}, _LONG),
    "fp8_4099": ({"dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn, "scale": 0.3}, _LONG),
    "window_1024": ({"sliding_window": 1024}, Batch((1, 1, 1), (1024, 1025, 2051), 4)),
    "scores_200": ({"scale": 8.0}, Batch((1, 1, 1), (1, 33, 142), 4)),
    # Half of the scores are far below -70,000. Softmax over one key is 1; a finite initial maximum makes it 0.
    "one_key_of_low_score": ({"scale": SCALE_OF_LOW_SCORES}, Batch((1, 1, 1), (1, 1, 1), 4)),
    "group_3": ({"num_q_heads": 3, "num_kv_heads": 1}, _SHORT),
    "group_7": ({"num_q_heads": 7, "num_kv_heads": 1}, _SHORT),
    "page_24": ({"page_size": 24}, _SHORT),
    "far_pages": ({"page_size": 1}, _SHORT),
    # Their last page holds one token; below: more query tokens than a tile, and a verification over several splits.
    "page_64": ({"page_size": 64}, Batch((1, 1, 1), (64, 65, 129), 4)),
    "page_128": ({"page_size": 128}, Batch((1, 1, 1), (128, 129, 257), 4)),
    "prefill_150": ({}, Batch((150, 70), (150, 160), 4)),
    "verify_2051": ({}, Batch((5, 5), (2051, 1100), 2)),
    "window_128": ({"sliding_window": 128}, Batch((1, 1, 1), (128, 129, 290), 4)),
    "page_256": ({"page_size": 256}, Batch((1, 1, 1), (255, 257, 513), 4)),
    **{f"dim_{dim}": ({"head_dim": dim}, _SHORT) for dim in (96, 192, 320, 512, 576)},
}
"""Changes to the base spec, each with the batch that exposes it: sizes that kernels are tuned or compiled for."""


def tested_values(field: str) -> list[int]:
    """Return the values of an int spec field that occur in any variant of any kind."""
    every = [change for kind in AttentionKind for change in (*PLAIN_SPECS[kind], *_VARIANTS[kind].values())]
    every += [change for change, _ in _EDGES.values()]
    return sorted({change[field] for change in every if field in change})


def named_specs(subject: Subject) -> list[AttentionSpec]:
    """Return the specs of all variants and edges that the backend accepts."""
    specs = [*(spec for _, spec in _specs(subject)), *(case.spec for _, case in edge_cases(subject))]
    return [spec for spec in specs if subject.backend.supports(spec, subject.device)]


def spec_cases(batches: dict[str, Batch], variants: Collection[str] | None = None) -> Cases:
    """Return a case generator: these variants, or all, with every batch. Rejected specs stay: rejection is a result."""

    def generate(subject: Subject) -> Iterable[tuple[str, Case]]:
        for variant, spec in _specs(subject):
            if variants is None or variant in variants:
                yield from _with_batches(variant, spec, batches)

    return generate


def base_cases(batches: dict[str, Batch]) -> Cases:
    """Return a case generator: a few telling variants, and the plainest of every other kind, with every batch."""
    of_other_kinds = (f"{kind.value}_base" for kind in AttentionKind)
    return spec_cases(batches, ("base", "window", "deepseek_v3", "deepseek_v4_packed", *of_other_kinds))


def edge_cases(subject: Subject) -> list[tuple[str, Case]]:
    """Return the edge cases of size and magnitude that the variants do not reach."""
    base = subject.base_spec()
    pools = {"far_pages": _FAR_PAGES}
    # The limit is that of the longest request.
    return [
        (edge, Case(_changed(base, changes), batch, pools.get(edge, 0), limit=1))
        for edge, (changes, batch) in _EDGES.items()
    ]


_PAGES = ("page_4", "page_64", "page_128")
"""Page sizes in addition to the plainest spec's, in ascending order; DECODE's requests cross a page edge in each."""


def page_cases(batches: dict[str, Batch]) -> Cases:
    """Return a case generator: the smallest and the largest of _PAGES that the backend serves, with every batch."""

    def generate(subject: Subject) -> Iterable[tuple[str, Case]]:
        plain = subject.base_spec().page_size
        served = [
            (variant, spec)
            for variant, spec in _specs(subject)
            if variant in _PAGES and spec.page_size != plain and subject.backend.supports(spec, subject.device)
        ]
        ends = dict([*served[:1], *served[-1:]])
        return [case for variant, spec in ends.items() for case in _with_batches(variant, spec, batches)]

    return generate


def joined(*generators: Cases) -> Cases:
    """Return a case generator that runs these generators in order."""
    return lambda subject: [case for generate in generators for case in generate(subject)]


def _specs(subject: Subject) -> Iterator[tuple[str, AttentionSpec]]:
    """Yield every variant of the base spec, then those of the plainest accepted spec of each other kind that the
    backend claims, named after the kind."""
    base = subject.base_spec()
    yield from _variants_of(base)
    for kind in subject.backend.capabilities.kinds:
        if kind is not base.kind:
            plains = plain_specs(kind, base.dtype)
            plain = next((spec for spec in plains if subject.backend.supports(spec, subject.device)), plains[0])
            yield from ((f"{kind.value}_{variant}", spec) for variant, spec in _variants_of(plain))


@cache
def _variants_of(base: AttentionSpec) -> list[tuple[str, AttentionSpec]]:
    """Cached per spec: every check of a backend uses them."""
    return [(variant, _changed(base, changes)) for variant, changes in _VARIANTS[base.kind].items()]


def _with_batches(variant: str, spec: AttentionSpec, batches: dict[str, Batch]) -> list[tuple[str, Case]]:
    return [(f"{variant}-{name}", Case(spec, batch)) for name, batch in batches.items()]


def _changed(spec: AttentionSpec, changes: dict[str, Any]) -> AttentionSpec:
    """Return the spec with these changes; fields derived from others are derived again."""
    derived: dict[str, Any] = {"scale": None, "kv_dtype": None}
    if "head_dim" in changes:
        derived["value_dim"] = None
    return replace(spec, **{**derived, **changes})
