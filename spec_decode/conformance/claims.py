"""What a backend says of itself, column by column, so that a report can be read where the backend is not installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from attn_backends import Feature
from builders import AdvanceLevel, AttentionKind, GraphSupport
from spec_decode.conformance.cases import base_spec, tested_values
from spec_decode.conformance.check import Subject, Unsupported
from spec_decode.conformance.report import EVERYTHING, Claim
from spec_decode.conformance.tags import strategy_obstacle
from spec_decode.drafter.plan import Strategy

_ALWAYS = (
    *("graph:capture", "graph:advance"),
    *(f"strategy:{strategy.value}" for strategy in Strategy),
    *(f"dtype:{name}" for name in ("float32", "float16", "bfloat16")),
    *("kv:mixed", "kv:float8_e4m3fn"),
    *(f"page:{size}" for size in tested_values("page_size")),
    *(f"dim:{dim}" for dim in tested_values("head_dim")),
    *(f"feature:{feature.value}" for feature in Feature),
    "feature:mla",
)
"""Claimed or denied by every backend, whichever checks it gets."""


def claims_of(subject: Subject, tags: Iterable[str]) -> dict[str, Claim]:
    """The claim for each of these tags, and for all that some backend is checked for.

    From the capability record, the builder's class and the drafter's own choice. A backend that refuses every spec on
    this device claims nothing there, with its reasons. A claim that cannot be read is none, and says so.
    """
    try:
        base_spec(subject)
    except Unsupported as refusal:
        return {EVERYTHING: Claim(claimed=False, reason=str(refusal))}
    except Exception as error:  # a plug-in's record may hold anything
        return {EVERYTHING: _unreadable(error)}
    wanted = dict.fromkeys([*_ALWAYS, *tags])
    wanted.pop(EVERYTHING, None)
    return {tag: _claim(subject, tag) for tag in sorted(wanted)}


def _claim(subject: Subject, tag: str) -> Claim:
    axis, _, value = tag.partition(":")
    read = _READERS.get(axis)
    try:
        return read(subject, value) if read else Claim(claimed=True)
    except Exception as error:  # a plug-in's record may hold anything
        return _unreadable(error)


def _unreadable(error: Exception) -> Claim:
    return Claim(claimed=False, reason=f"the claim cannot be read: {type(error).__name__}: {error}")


def _graph(subject: Subject, value: str) -> Claim:
    builder = subject.backend.builder
    if value == "capture":
        level = GraphSupport(builder.graph_support)
        return Claim(claimed=level > GraphSupport.NEVER, level=level_words(level))
    support = builder.advance_support(base_spec(subject), subject.device)
    return Claim(claimed=support.level > AdvanceLevel.REBUILD, level=level_words(support.level), reason=support.reason)


def level_words(level: GraphSupport | AdvanceLevel) -> str:
    """A level as reports name it."""
    return level.name.lower().replace("_", " ")


def _strategy(subject: Subject, value: str) -> Claim:
    obstacle = strategy_obstacle(subject, Strategy(value))
    return Claim(claimed=not obstacle, reason=obstacle)


def _dtype(subject: Subject, value: str) -> Claim:
    return Claim(claimed=getattr(torch, value) in subject.backend.capabilities.dtypes)


def _kv(subject: Subject, value: str) -> Claim:
    able = subject.backend.capabilities
    if value == "mixed":
        return Claim(claimed=able.mixed_kv_dtypes)
    return Claim(
        claimed=getattr(torch, value) in able.kv_dtypes,
        reason="queries and weights are rounded to it too" if able.quantises_queries else "",
    )


def _page(subject: Subject, value: str) -> Claim:
    sizes = subject.backend.capabilities.page_sizes
    return Claim(claimed=int(value) in sizes, reason=f"page size {sizes}")


def _dim(subject: Subject, value: str) -> Claim:
    sizes = subject.backend.capabilities.head_dims
    return Claim(claimed=int(value) in sizes, reason=f"head dim {sizes}")


def _feature(subject: Subject, value: str) -> Claim:
    able = subject.backend.capabilities
    if value == "mla":
        return Claim(claimed=AttentionKind.MLA in able.kinds)
    feature = Feature(value)
    return Claim(claimed=feature in able.features, reason="a spec must ask for it" if feature in able.required else "")


_READERS: dict[str, Callable[[Subject, str], Claim]] = {
    "graph": _graph,
    "strategy": _strategy,
    "dtype": _dtype,
    "kv": _kv,
    "page": _page,
    "dim": _dim,
    "feature": _feature,
}
"""By axis. Every other column is part of the contract, and whoever registers a backend claims it."""
