"""Whether a backend accepts what was asked: by its capability record if it is installed, else by a report's claims."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum

import msgspec
import torch

from attn_backends import AttentionBackend
from spec_decode.conformance.claims import REQUIRED
from spec_decode.conformance.coverage import EVERYTHING, MIXED_KV, MLA
from spec_decode.conformance.report import Report
from spec_decode.matrix.columns import Column, columns_of
from spec_decode.matrix.question import Question, specs_of, worded
from spec_decode.testing.outcome import Outcome

_FEATURES = {
    "window": "sliding_window",
    "soft cap": "soft_cap",
    "sinks": "sinks",
    "value dim": "value_dim",
    "batch invariant": "batch_invariant",
    "blocks": "non_causal",
    "trees": "tree",
}
"""Axis -> the feature that it needs, if it is on."""


class Support(str, Enum):
    """Whether a backend serves what was asked."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    UNKNOWN = "unknown"


class Acceptance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether it serves what was asked. source: what says so. reasons: why it is refused, or unknown. unsaid: what the
    source does not say. example: the spec that was accepted, with common values for what was not asked. required:
    features that every spec of the backend must have."""

    support: Support
    source: str
    reasons: tuple[str, ...] = ()
    unsaid: tuple[str, ...] = ()
    example: str = ""
    required: tuple[str, ...] = ()


def needed_tags(question: Question) -> tuple[str, ...]:
    """Return the columns of the matrix that what was asked needs."""
    values = question.values
    sized = [f"{axis}:{values[axis]}" for axis in ("dtype", "page", "dim") if axis in values]
    kv = values["kv dtype"]
    narrow = isinstance(kv, str) and kv.startswith("float8")
    heads, kv_heads = values.get("heads"), values.get("kv heads")
    grouped = values.get("group", 1) != 1 or (kv_heads is not None and heads not in (None, kv_heads))
    return (
        *([f"mode:{values['mode']}"] if "mode" in values else []),
        *([f"strategy:{str(values['strategy']).replace(' ', '_')}"] if "strategy" in values else []),
        *sized,
        *([f"kv:{kv}" if narrow else MIXED_KV] if kv else []),
        *(["feature:gqa"] if grouped and values["kind"] == "mha" else []),
        *(f"feature:{feature}" for axis, feature in _FEATURES.items() if values[axis]),
        *([MLA] if values["kind"] == "mla" else []),
    )


def by_record(question: Question, backend: AttentionBackend, report: Report) -> Acceptance:
    """Return what an installed backend's record says of the kind of device that the report comes from, and what the
    report says of the strategy, which the record does not hold."""
    source = f"the capability record of version {backend.version}, installed here"
    try:
        able = backend.capabilities
        refused, example = _refused_by_record(question, backend, on_cuda=report.env.cuda is not None)
        required = tuple(sorted(feature.value for feature in able.required))
    except Exception as error:  # a plug-in's record can hold anything
        unreadable = f"it cannot be read: {type(error).__name__}: {error}"
        return Acceptance(support=Support.UNKNOWN, source=source, reasons=(unreadable,))
    refused += _refused(report, [tag for tag in needed_tags(question) if tag.startswith("strategy:")])
    return Acceptance(
        support=Support.REFUSED if refused else Support.ACCEPTED,
        source=source,
        reasons=tuple(refused),
        example="" if refused else example,
        required=required,
    )


def _refused_by_record(question: Question, backend: AttentionBackend, *, on_cuda: bool) -> tuple[list[str], str]:
    """Return the reasons against the spec with the fewest, and the spec."""
    able, device = backend.capabilities, torch.device("cuda" if on_cuda else "cpu")
    found: list[str] | None = None
    example = ""
    for spec in specs_of(question):
        reasons = [*able.spec_reasons(spec), *backend.unsupported_reasons(spec, device)]
        if found is None or len(reasons) < len(found):
            found, example = reasons, spec.describe()
        if not reasons:
            break
    devices = [] if device.type in able.devices else [f"runs on {' and '.join(able.devices)}, not on {device.type}"]
    return [*devices, *(found or ())], example


def by_claims(question: Question, reports: Sequence[Report]) -> Acceptance:
    """Return what the claims of a backend's reports say, newest first."""
    report = next((each for each in reports if each.claims), reports[0])
    tags, values = needed_tags(question), question.values
    required = [tag for tag, claim in report.claims.items() if claim.reason == REQUIRED]
    refused = list(_refused(report, tags))
    refused += [f"serves only specs with {tag.partition(':')[2]}" for tag in required if tag not in tags]
    if values["kind"] == "mha" and _refuses_mha(reports):
        refused.append("serves mla, not mha")
    unsized = ("heads", "kv heads", "group", "value dim", "window", "soft cap", "scale")
    missing = [_missing(report, column) for column in columns_of(tags) if column.tag not in report.claims]
    sizes = [worded(axis, values[axis]) for axis in unsized if values.get(axis) not in (None, 1)]
    unloaded = not report.claims
    return Acceptance(
        support=Support.REFUSED if refused else Support.UNKNOWN if unloaded else Support.ACCEPTED,
        source=f"the claims in the report of {report.env.date[:10]}",
        reasons=tuple(refused) or ((_why_unloaded(report),) if unloaded else ()),
        unsaid=() if refused or unloaded else (*missing, *sizes),
        required=tuple(sorted(tag.partition(":")[2] for tag in required)),
    )


def _missing(report: Report, column: Column) -> str:
    """Name a column without a claim, with the claimed range of its axis if another column has it."""
    axis = column.tag.partition(":")[0]
    ranges = (claim.reason for tag, claim in report.claims.items() if tag.startswith(f"{axis}:") and claim.reason)
    claimed = next(ranges, "") if axis in ("page", "dim") else ""
    return f"{column.label} (it claims {claimed})" if claimed else column.label


def _refused(report: Report, tags: Sequence[str]) -> Iterator[str]:
    """Yield why a report's claims deny these columns; the same reason once."""
    everything = report.claims.get(EVERYTHING)
    if everything is not None and not everything.claimed:
        yield everything.reason
        return
    denied: dict[str, str] = {}
    for column in columns_of(tags):
        claim = report.claims.get(column.tag)
        if claim is not None and not claim.claimed and not column.tag.startswith("mode:"):
            denied[claim.reason or column.label] = f"{column.label}: {claim.reason or 'not claimed'}"
    yield from denied.values()


def _refuses_mha(reports: Iterable[Report]) -> bool:
    """Whether a check saw that the backend serves latents only: no column says so."""
    return any(
        (result.check, result.case, result.outcome) == ("refusal.unclaimed_is_refused", "mha", Outcome.PASS)
        for report in reports
        for result in report.results
    )


def _why_unloaded(report: Report) -> str:
    return next((result.reason for result in report.results if result.reason), "the report has no claims")
