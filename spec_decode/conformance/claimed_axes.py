"""The axes on which specs and batches differ, with the classes of values that a capability record claims."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from attn_backends import Capabilities, Feature, Sizes
from builders import AttentionKind
from spec_decode.conformance.covering import Axis, Values


def spec_axes(able: Capabilities) -> list[Axis]:
    """Return the axes of a spec, with the classes that the capability record claims."""

    def optional(feature: Feature, plain: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
        """Return the classes without and with a feature, as far as they are claimed."""
        return (plain if feature not in able.required else {}) | (more if feature in able.features else {})

    caches: dict[str, list[Any]] = {"kv as the queries": [(None, False)]}
    caches |= {str(dtype): [(dtype, False)] for dtype in able.kv_dtypes}
    caches |= {"kv wider": [(dtype, False) for dtype in able.dtypes]} if able.mixed_kv_dtypes else {}
    caches |= optional(Feature.HEAD_SCALES, {}, {"head scales": [_BY_HEAD]})
    masks = ["chain"] + ["block"] * (Feature.NON_CAUSAL in able.features) + ["tree"] * (Feature.TREE in able.features)
    latents_only = able.kinds == (AttentionKind.MLA,)
    return [
        Axis("kind", {kind.value: [kind] for kind in able.kinds}),
        Axis("dtype", {str(dtype): [dtype] for dtype in able.dtypes}),
        Axis("cache", caches),
        Axis("num_kv_heads", {"1": [1]} if latents_only else _KV_HEADS),
        Axis("group_size", optional(Feature.GQA, {"1": [1]}, _GROUPS)),
        Axis("dims", _dims(able)),
        Axis("page_size", claimed_sizes(_PAGES, able.page_sizes)),
        Axis("window", optional(Feature.SLIDING_WINDOW, {"none": [None]}, _WINDOWS)),
        Axis("scale", {"default": [1.0], "another": [0.25, 0.5, 3.0]}),
        Axis("soft_cap", optional(Feature.SOFT_CAP, {"none": [None]}, {"capped": [0.5, 2.0, 8.0, 30.0, 50.0, 100.0]})),
        Axis("sinks", optional(Feature.SINKS, {"none": [False]}, {"one per head": [True]})),
        Axis("mask", {mask: [mask] for mask in masks}),
        Axis("batch_invariant", optional(Feature.BATCH_INVARIANT, {"no": [False]}, {"yes": [True]})),
    ]


def claimed_values(able: Capabilities) -> dict[str, list[Values]]:
    """Return everything that the capability record claims, by name, each with the ways in which a spec can have it."""
    axes = {axis.name: [value for values in axis.classes.values() for value in values] for axis in spec_axes(able)}
    listed = {
        f"{name} {str(value).removeprefix('torch.')}": [{name: value}]
        for name in ("kind", "dtype", "page_size")
        for value in axes[name]
    }
    listed |= {
        f"kv_dtype {str(cache[0]).removeprefix('torch.')}": [{"cache": cache}]
        for cache in axes["cache"]
        if cache[0] is not None and cache != _BY_HEAD
    }
    dims: dict[str, list[Values]] = {}
    for pair in claimed_dims(able):
        for name, dim in zip(("head_dim", "value_dim"), pair, strict=True):
            dims.setdefault(f"{name} {dim}", []).append({"dims": pair})
    features: dict[Feature, list[Values]] = {
        Feature.GQA: [{"group_size": size} for size in axes["group_size"] if size > 1],
        Feature.SLIDING_WINDOW: [{"window": window} for window in axes["window"] if window],
        Feature.SOFT_CAP: [{"soft_cap": cap} for cap in axes["soft_cap"] if cap],
        Feature.SINKS: [{"sinks": True}],
        Feature.VALUE_DIM: [{"dims": pair} for pair in axes["dims"] if pair[0] != pair[1]],
        Feature.BATCH_INVARIANT: [{"batch_invariant": True}],
        Feature.NON_CAUSAL: [{"mask": "block"}],
        Feature.TREE: [{"mask": "tree"}],
        Feature.HEAD_SCALES: [{"cache": _BY_HEAD}],
    }
    return listed | dims | {feature.value: ways for feature, ways in features.items() if feature in able.features}


def claimed_dims(able: Capabilities) -> list[tuple[int, int]]:
    """Return (head_dim, value_dim), as far as the capability record claims each of the two."""
    return [pair for pairs in _dims(able).values() for pair in pairs]


_BY_HEAD = (torch.float8_e4m3fn, True)
"""A cache: its dtype, and whether each KV head has scales of its own."""
MOST_HEADS = 256
"""Query heads of a drawn spec at most."""
_KV_HEADS = {
    "1": [1],
    "2": [2],
    "4": [4],
    "3 to 7": [3, 5, 6, 7],
    "8": [8],
    "9 to 16": [9, 10, 12, 16],
    "above 16": [20, 24, 32, 40, 64, 96, 128],
}
_GROUPS = {
    "1": [1],
    "powers of two": [2, 4, 8],
    "3": [3],
    "5": [5],
    "6": [6],
    "7": [7],
    "9 to 15": [9, 10, 11, 12, 13, 14, 15],
    "16": [16],
    "above 16": [20, 24, 32, 48, 64, 128],
}
_PAGES = {
    "1": [1],
    "2 to 8": [2, 4, 8],
    "16": [16],
    "32": [32],
    "64": [64],
    "128": [128],
    "256 and more": [256, 512, 1024],
    "no powers of two": [3, 5, 6, 7, 12, 24, 33, 48, 63, 96, 100],
}
_FEW_DIMS = 8
_DIMS = {
    "below 64": [16, 24, 32, 40, 48, 56],
    "64": [64],
    "128": [128],
    "256": [256],
    "multiples of 16": [80, 96, 112, 144, 160, 176, 192, 208, 224, 240],
    "multiples of 8": [72, 88, 104, 120, 136, 152, 200, 248],
    "no multiples of 8": [33, 50, 65, 100, 127],
    "above 256": [320, 512, 576],
}
_WINDOWS = {
    "1": [1],
    "2 to 40": [2, 3, 8, 15, 16, 17, 33, 40],
    "63 to 300": [63, 64, 65, 100, 127, 128, 129, 255, 256, 257],
    "511 to 4,096": [511, 512, 1023, 1024, 1025, 2048, 4095, 4096],
    "above 4,096": [4097, 5000, 8192],
}


def claimed_sizes(classes: dict[str, list[int]], sizes: Sizes) -> dict[str, list[int]]:
    """Return the part of the classes that is claimed, and the ends of the claim as classes of their own."""
    ends = {
        f"its {end}, {size}": [size] for end, size in (("smallest", sizes.smallest), ("largest", sizes.largest)) if size
    }
    within = {label: [size for size in each if size in sizes] for label, each in classes.items()}
    return ends | {label: each for label, each in within.items() if each and each not in ends.values()}


def dims_of(sizes: Sizes) -> dict[str, list[int]]:
    """Return the classes of dims that are claimed, but for those so small that a relative error says little."""
    classes = claimed_sizes(_DIMS, sizes)
    return {label: kept for label, each in classes.items() if (kept := [dim for dim in each if dim >= _FEW_DIMS])}


def _dims(able: Capabilities) -> dict[str, list[tuple[int, int]]]:
    """Return classes of (head_dim, value_dim)."""
    value_dims = able.value_dims or able.head_dims
    of_heads, of_values = dims_of(able.head_dims), dims_of(value_dims)
    heads, values = (sorted({dim for each in classes.values() for dim in each}) for classes in (of_heads, of_values))
    same = {label: [(dim, dim) for dim in each if dim in value_dims] for label, each in of_heads.items()}
    unlike = {
        "narrower values": [(dim, value) for dim in heads for value in values if value < dim],
        "wider values": [(dim, value) for dim in heads for value in values if value > dim],
    }
    if able.kinds == (AttentionKind.MLA,):
        del unlike["wider values"]
    classes = {} if Feature.VALUE_DIM in able.required else same
    classes |= unlike if Feature.VALUE_DIM in able.features else {}
    return {label: each for label, each in classes.items() if each}


class Length(NamedTuple):
    """The longest request of a batch, the sum of these; it is at least as long as its query."""

    tokens: int
    pages: int = 0
    windows: int = 0


BATCH_AXES = [
    Axis(
        "rows",
        {
            "1": [1],
            "2 to 4": [2, 3, 4],
            "5 to 16": [5, 8, 11, 16],
            "17 to 127": [17, 33, 65, 100],
            "128 and more": [128, 129, 200, 257],
        },
    ),
    Axis("padding", {"none": [0], "a row": [1], "rows": [2, 3, 5]}),
    Axis(
        "query",
        {
            "one token": [("uniform", 1)],
            "2 to 5 tokens": [("uniform", tokens) for tokens in (2, 3, 4, 5)],
            "6 to 16 tokens": [("uniform", tokens) for tokens in range(6, 17)],
            "17 to 64 tokens": [("uniform", tokens) for tokens in (17, 24, 32, 33, 64)],
            "prompts": [("prompts", tokens) for tokens in (7, 20, 66, 130)],
            "a mixture": [("mixed", tokens) for tokens in (2, 9, 20, 70)],
            "as many tokens as rows": [("balanced", 1)],
        },
    ),
    Axis(
        "length",
        {
            "its query's": [Length(0)],
            "a few pages": [Length(more, pages=pages) for pages in (1, 2, 3) for more in (0, 1, -1)],
            "above its window": [Length(more, windows=1) for more in (1, 2, 17)],
            "up to 300": [Length(tokens) for tokens in (60, 127, 128, 129, 150, 290)],
            "up to 4,096": [Length(tokens) for tokens in (513, 700, 1030, 2051, 4096)],
            "above 4,096": [Length(tokens) for tokens in (4101, 5000, 8200)],
            "above 16,384": [Length(tokens) for tokens in (16_400, 32_800, 66_000)],
        },
    ),
    Axis("room", {"none": [(1, 1)], "a longer limit": [(2, 1), (5, 1)], "a wider table": [(1, 2), (1, 3)]}),
    Axis("neighbour", {"finite": [False], "not finite": [True]}),
]
"""A batch: requests, padding rows, tokens per query, the longest request, how much longer its limit is and how much
wider the table than the limit, and whether a neighbour's cache and query hold NaN."""
