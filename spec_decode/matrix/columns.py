"""The columns of the matrix: one for each tag that a report claims or checks, grouped by axis."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec

from spec_decode.conformance.coverage import EVERYTHING
from spec_decode.drafter import Strategy

_STATE = "Recurrent state"
_AXES: dict[str, tuple[str, dict[str, str]]] = {
    "mode": ("Attention", {"prefill": "prefill", "extend": "extend", "decode": "decode", "verify": "verify"}),
    "contract": ("Contract", {"declared": "declared", "refusals": "refusals", "memory": "memory"}),
    "graph": ("Graphs", {"capture": "graph support", "advance": "advance"}),
    "strategy": ("Drafting", {strategy.value: strategy.value.replace("_", " ") for strategy in Strategy}),
    "dtype": ("Dtype", {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}),
    "kv": ("KV dtype", {"float8_e4m3fn": "fp8 KV", "float8_e5m2": "fp8 e5m2 KV", "mixed": "wider KV"}),
    "page": ("Page size", {}),
    "dim": ("Head dim", {}),
    "feature": (
        "Features",
        {
            "sliding_window": "window",
            "sinks": "sinks",
            "soft_cap": "soft cap",
            "gqa": "GQA",
            "value_dim": "value dim",
            "batch_invariant": "batch invariant",
            "non_causal": "blocks",
            "tree": "trees",
            "head_scales": "head scales",
            "mla": "MLA",
            "sparse": "sparse",
        },
    ),
    "fused_write": ("Fused writes", {"rope": "rope + write", "kv_a_norm_rope": "norm + rope + write"}),
    "recurrence": (
        _STATE,
        {"gated_delta": "gated delta rule", "kda": "KDA", "ssd": "Mamba2", "conv": "short convolution"},
    ),
    "state": (
        _STATE,
        {"grouped_keys": "grouped keys", "tree": "state trees", "bitwise_rollback": "bitwise", "journal": "journal"},
    ),
    "state_dtype": (_STATE, {"float32": "fp32 state", "float16": "fp16 state", "bfloat16": "bf16 state"}),
    "family": ("Other checks", {}),
}
"""Axis -> title of its group, and the labels of its values in order. Values without a label are numbers or new."""

_MEANINGS = {
    "mode:prefill": "A whole prompt at once.",
    "mode:extend": "Several new tokens after cached ones.",
    "mode:decode": "One new token per request.",
    "mode:verify": "1 + K new tokens for every request, as in step 0 and verification.",
    "contract:declared": "Capabilities, versions and claims are stated as data, and metadata is frozen.",
    "contract:refusals": "Unclaimed specs are rejected with every reason, and bad tensors never reach a kernel.",
    "contract:memory": "Outputs depend only on a request's own tokens, never on uninitialised memory.",
    "graph:capture": "The widest batch shape whose attention can be captured and replayed over other batches.",
    "graph:advance": "How the metadata moves one token forward.",
    **{f"strategy:{each.value}": (inspect.getdoc(each.implementation) or "").partition("\n")[0] for each in Strategy},
    "kv:mixed": "The KV cache's dtype differs from the queries', and is as wide or wider.",
    "recurrence:ssd": "A matrix that tokens are added to, as in Mamba2.",
    "recurrence:conv": "A window of inputs only, as in LFM2.",
    "feature:sparse": "The softmax includes listed entries of a second, compressed cache.",
    "feature:non_causal": "Query tokens that are predicted as a block: each sees the later ones too.",
    "feature:tree": "Query tokens that form trees: each sees its ancestors, not its siblings.",
    "recurrence:gated_delta": "One decay per value head, as in Qwen3-Next and Qwen3.5.",
    "recurrence:kda": "One decay per value head and key channel: Kimi Delta Attention.",
    "state:journal": "The tokens that a slot can hold beyond its checkpoint.",
    "state:grouped_keys": "Value heads that share a key head.",
    "state:tree": "Query tokens that form trees: each state follows its ancestors.",
    "state:bitwise_rollback": "A state after rejected drafts has the bits of one whose tokens were certain.",
    "feature:value_dim": "Value heads and key heads differ in size.",
}


class Column(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One column. tag: key for evidence and claims; label: short, and clear without the group."""

    tag: str
    label: str
    group: str
    meaning: str = ""


def columns_of(tags: Iterable[str]) -> tuple[Column, ...]:
    """Return the columns of these tags; unknown axes come last, under their own names."""
    return tuple(map(_column, sorted(set(tags) - {EVERYTHING}, key=_rank)))


def _column(tag: str) -> Column:
    axis, _, value = tag.partition(":")
    group, labels = _AXES.get(axis, (axis, {}))
    label = labels.get(value) or (f"{axis} {value}" if value else axis)
    return Column(tag=tag, label=label, group=group, meaning=_MEANINGS.get(tag, ""))


def _rank(tag: str) -> tuple[int, int, int, str]:
    axis, _, value = tag.partition(":")
    axes = list(_AXES)
    known = list(_AXES[axis][1]) if axis in _AXES else []
    return (
        axes.index(axis) if axis in axes else len(axes),
        known.index(value) if value in known else len(known),
        int(value) if value.isdecimal() and len(value) < 10 else 0,
        tag,
    )


def grouped(columns: Sequence[Column]) -> list[tuple[str, list[Column]]]:
    """Return the titles of the groups with their columns."""
    return [(title, list(found)) for title, found in groupby(columns, key=lambda column: column.group)]
