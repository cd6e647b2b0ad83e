"""A backend's claims, column by column, so that a report can be read where the backend is not installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from attn_backends import Feature, FusedWrite, StateFeature
from builders import AdvanceLevel, AttentionKind, GraphSupport, Recurrence
from spec_decode.conformance import coverage
from spec_decode.conformance.cases import tested_values
from spec_decode.conformance.check import AnySubject
from spec_decode.conformance.coverage import EVERYTHING, column, unsupported_strategies
from spec_decode.conformance.report import Claim
from spec_decode.drafter import Strategy
from spec_decode.testing.outcome import Unsupported
from spec_decode.testing.state_subject import StateSubject
from spec_decode.testing.subject import Subject

REQUIRED = "a spec must request it"
"""The reason of a claim on a feature without which the backend serves nothing."""


def claims_of(subject: AnySubject, columns: Iterable[str]) -> dict[str, Claim]:
    """Return the claim for each of these columns, and for every column with a reader.

    Claims come from the capability record, the builder's class and the drafter's own choice. An engine's builder claims
    only its graph and advance support: the capability record describes the wrapper around it. A backend that rejects
    every spec on this device claims nothing there, with its reasons. A claim that cannot be read counts as not claimed,
    with the error as its reason.
    """
    try:
        subject.base_spec()
    except Unsupported as refusal:
        return {EVERYTHING: Claim(claimed=False, reason=str(refusal))}
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plug-in's record can hold anything
        return {EVERYTHING: _unreadable(error)}
    readers = _STATE_READERS if isinstance(subject, StateSubject) else _READERS
    claimed = _BUILDER_CLAIMS if subject.engine else {*readers, *columns} - {EVERYTHING}
    return {tag: _claim(subject, readers.get(tag)) for tag in sorted(claimed)}


def level_words(level: GraphSupport | AdvanceLevel) -> str:
    """Return a level as reports name it."""
    return level.name.lower().replace("_", " ")


def _claim(subject: AnySubject, read: Callable[[Any], Claim] | None) -> Claim:
    try:
        return read(subject) if read else Claim(claimed=True)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plug-in's record can hold anything
        return _unreadable(error)


def _unreadable(error: BaseException) -> Claim:
    return Claim(claimed=False, reason=f"the claim cannot be read: {type(error).__name__}: {error}")


def _capture(subject: AnySubject) -> Claim:
    level = GraphSupport(subject.backend.builder.graph_support)
    return Claim(claimed=level > GraphSupport.NEVER, level=level_words(level))


def _advance(subject: AnySubject) -> Claim:
    spec: Any = subject.base_spec()
    support = subject.backend.builder.advance_support(spec, subject.device)
    return Claim(claimed=support.level > AdvanceLevel.REBUILD, level=level_words(support.level), reason=support.reason)


def _strategy(strategy: Strategy, subject: Subject) -> Claim:
    reason = unsupported_strategies(subject).get(strategy, "")
    return Claim(claimed=not reason, reason=reason)


def _kv(dtype: torch.dtype, subject: Subject) -> Claim:
    able = subject.backend.capabilities
    rounded = "queries and weights are rounded to it too" if able.quantises_queries else ""
    return Claim(claimed=dtype in able.kv_dtypes, reason=rounded)


def _dtype(dtype: torch.dtype, subject: Subject) -> Claim:
    able = subject.backend.capabilities
    rounded = "partial outputs of a split prefix are rounded to it and summed in it" if able.rounds_partials else ""
    return Claim(claimed=dtype in able.dtypes, reason=rounded)


def _feature(feature: Feature, subject: Subject) -> Claim:
    able = subject.backend.capabilities
    return Claim(claimed=feature in able.features, reason=REQUIRED if feature in able.required else "")


def _listed(field: str, value: object, subject: AnySubject) -> Claim:
    """Whether a field of the capability record contains the value."""
    return Claim(claimed=value in getattr(subject.backend.capabilities, field))


def _size(field: str, size: int, subject: AnySubject) -> Claim:
    """The same for a field that is a range of sizes; the range becomes the reason."""
    sizes = getattr(subject.backend.capabilities, field)
    return Claim(claimed=size in sizes, reason=f"{field.removesuffix('s').replace('_', ' ')} {sizes}")


_BUILDER_CLAIMS = {coverage.CAPTURE, coverage.ADVANCE}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_READERS: dict[str, Callable[[Any], Claim]] = {
    coverage.CAPTURE: _capture,
    coverage.ADVANCE: _advance,
    **{column("strategy", strategy): partial(_strategy, strategy) for strategy in Strategy},
    **{column("dtype", dtype): partial(_dtype, dtype) for dtype in _DTYPES},
    coverage.MIXED_KV: lambda subject: Claim(claimed=subject.backend.capabilities.mixed_kv_dtypes),
    column("kv", torch.float8_e4m3fn): partial(_kv, torch.float8_e4m3fn),
    **{column("page", size): partial(_size, "page_sizes", size) for size in tested_values("page_size")},
    **{column("dim", dim): partial(_size, "head_dims", dim) for dim in tested_values("head_dim")},
    **{column("feature", feature): partial(_feature, feature) for feature in Feature},
    coverage.MLA: partial(_listed, "kinds", AttentionKind.MLA),
    **{column("fused_write", write): partial(_listed, "fused_writes", write) for write in FusedWrite},
}
"""What every backend claims or denies, whichever checks it gets. Every other column is part of the contract, so
registering a backend claims it."""
_STATE_READERS: dict[str, Callable[[Any], Claim]] = {
    coverage.CAPTURE: _capture,
    coverage.ADVANCE: _advance,
    **{column("dtype", dtype): partial(_listed, "dtypes", dtype) for dtype in _DTYPES},
    **{column("recurrence", each): partial(_listed, "recurrences", each) for each in Recurrence},
    **{column("state_dtype", dtype): partial(_listed, "state_dtypes", dtype) for dtype in _DTYPES},
    coverage.JOURNAL: lambda subject: Claim(claimed=True, level=str(subject.backend.capabilities.journals)),
    **{column("state", feature): partial(_listed, "features", feature) for feature in StateFeature},
}
"""The same of a backend of recurrent state."""
