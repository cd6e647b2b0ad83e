"""The axes on which a check's case and a question differ: an attention's fields, the batch's shape, the strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spec_decode.conformance.coverage import MIXED_KV, MLA
from spec_decode.conformance.report import Result

Value = int | float | str | bool | None
"""A count, a factor or a name; None for what an attention does without, and for a field that follows another."""


@dataclass(frozen=True, slots=True)
class NotRecorded:
    """A value that a report does not hold. text: what it says of it."""

    text: str = "not recorded"


Values = Mapping[str, Value | NotRecorded | frozenset[str]]
"""Axis -> its value. Of the axes "mode" and "strategy", a check covers a set."""
AT_LEAST = ("rows", "length")
"""Axes of which a larger value covers a smaller one."""
COVERED = ("mode", "strategy")
"""Axes of which a check can cover several values."""
SPEC = "spec"
"""The axis that stands for all of an attention's fields where a report records none of them."""

_FLAGS = {
    **{"sinks": "sinks", "batch invariant": "batch_invariant", "blocks": "non_causal", "trees": "tree"},
    "head scales": "head_scales",
}
"""Axis -> its feature, of those that are on or off."""


def axes_of(result: Result) -> Values:
    """Return the axes of a result's case: from its spec and batch, or, in a report without these, from its columns,
    which hold dtypes, page, dim and features, but no sizes of windows or groups. A case of neither has SPEC instead."""
    tags = [tag.partition(":")[::2] for tag in result.tags]
    found: dict[str, Value | NotRecorded | frozenset[str]] = {
        axis: frozenset(value.replace("_", " ") for of, value in tags if of == axis) for axis in COVERED
    }
    if result.batch is not None:
        found |= {"rows": result.batch.rows, "length": result.batch.seq_lens[1]}
    else:
        found |= dict.fromkeys(AT_LEAST, NotRecorded())
    if result.spec is not None:
        return {**found, **_of_spec(result)}
    columns = dict(tags)
    if "page" not in columns or "dtype" not in columns:
        return {**found, SPEC: NotRecorded()}
    return {**found, **_of_tags(result.tags, columns)}


def _of_spec(result: Result) -> dict[str, Value]:
    record = result.spec
    assert record is not None
    return {
        "kind": record.kind.value,
        "heads": record.num_q_heads,
        "kv heads": record.num_kv_heads,
        "group": record.num_q_heads // record.num_kv_heads,
        "dim": record.head_dim,
        "value dim": record.value_dim,
        "page": record.page_size,
        "dtype": record.dtype,
        "kv dtype": record.kv_dtype,
        "window": record.sliding_window,
        "scale": record.scale,
        "soft cap": record.soft_cap,
        "sinks": record.sinks,
        "batch invariant": record.batch_invariant,
        "blocks": not record.causal,
        "trees": record.tree,
        "head scales": record.head_scales,
    }


def _of_tags(tags: tuple[str, ...], columns: Mapping[str, str]) -> dict[str, Value | NotRecorded]:
    features = {value for axis, _, value in (tag.partition(":") for tag in tags) if axis == "feature"}

    def sized(feature: str, without: Value, text: str) -> Value | NotRecorded:
        return NotRecorded(text) if feature in features else without

    kv = columns.get("kv")
    return {
        "kind": "mla" if MLA in tags else "mha",
        "heads": NotRecorded(),
        "kv heads": NotRecorded(),
        "group": sized("gqa", 1, "of unrecorded size"),
        "dim": int(columns["dim"]) if columns.get("dim", "").isdecimal() else NotRecorded(),
        "value dim": sized("value_dim", None, "of unrecorded size"),
        "page": int(columns["page"]) if columns["page"].isdecimal() else NotRecorded(),
        "dtype": columns["dtype"],
        "kv dtype": NotRecorded("wider than dtype") if MIXED_KV in tags else kv,
        "window": sized("sliding_window", None, "of unrecorded size"),
        "scale": NotRecorded(),
        "soft cap": sized("soft_cap", None, "of unrecorded size"),
        **{axis: feature in features for axis, feature in _FLAGS.items()},
    }
