"""Recurrent states and steps drawn from all that a backend claims, in which most pairs of classes of sizes occur."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from random import Random

from attn_backends import StateFeature
from attn_backends.state_capabilities import StateCapabilities
from builders import StateSpec
from builders.kernels.triton_runtime import interpreting
from spec_decode.conformance.claimed_axes import claimed_sizes, dims_of
from spec_decode.conformance.covering import Axis, CoveringSearch, Values
from spec_decode.testing.state_subject import StateSubject, varied

_CASES = 16
_TOKENS, _ELEMENTS = 200, 2_000_000
"""What a case can cost: tokens of all requests; elements of the states after each token of a step."""
_INTERPRETED = 9
"""Blocks of 32 columns of all states that Triton's interpreter runs in about two seconds."""
STEPS = 2
"""Verifications after the prompts."""


@dataclass(frozen=True, slots=True)
class DrawnState:
    """A group of layers, and how many tokens its requests have."""

    spec: StateSpec
    rows: int
    prompt: int
    """Tokens of the longest prompt."""
    query: int
    """Tokens of a verification."""
    bias: bool


def drawn_states(subject: StateSubject, seed: int) -> Iterator[tuple[str, DrawnState]]:
    """Yield the cases of a seed, by name. Raises Unsupported if the backend rejects every plain spec."""
    base, random = subject.base_spec(), Random(seed)

    def fits(values: Values) -> bool:
        spec, query = _spec(base, values), values.get("query", 1)
        rows, prompt = values.get("rows", 1), values.get("prompt", 1)
        return (
            bool(subject.backend.supports(spec, subject.device))
            and query <= values.get("journal", inf)
            and rows * (prompt + STEPS * query) <= _TOKENS
            and (not interpreting() or rows * spec.num_value_heads * -(-spec.value_dim // 32) <= _INTERPRETED)
            and rows * max(prompt, query) * spec.matrices * spec.key_dim * spec.value_dim <= _ELEMENTS
        )

    axes = _axes(subject.backend.capabilities)
    search = CoveringSearch([_shuffled(axis, random) for axis in axes], fits, random)
    for place in range(_CASES):
        values = search.draw([axis.name for axis in axes]).values
        shape = {name: values.get(name, 1) for name in ("rows", "prompt", "query")}
        yield f"s{seed}-{place:02}", DrawnState(_spec(base, values), **shape, bias=values.get("bias", True))


def _shuffled(axis: Axis, random: Random) -> Axis:
    return Axis(axis.name, {label: random.sample(each, len(each)) for label, each in axis.classes.items()})


def _axes(able: StateCapabilities) -> list[Axis]:
    groups = _GROUPS if StateFeature.GROUPED_KEYS in able.features else {"1": [1]}
    named = {"recurrence": able.recurrences, "dtype": able.dtypes, "state_dtype": able.state_dtypes}
    return [
        *(Axis(name, {str(value): [value] for value in values}) for name, values in named.items()),
        Axis("key_dim", dims_of(able.key_dims)),
        Axis("value_dim", dims_of(able.value_dims)),
        Axis("conv_width", claimed_sizes(_WIDTHS, able.conv_widths)),
        Axis("journal", claimed_sizes(_JOURNALS, able.journals)),
        Axis("num_key_heads", {"1": [1], "2": [2], "above 2": [3, 5, 6]}),
        Axis("group_size", groups),
        Axis("rows", {"1": [1], "2 to 8": [2, 3, 5, 8], "above 8": [9, 12, 17]}),
        Axis("prompt", {"1": [1], "2 to 16": [2, 7, 15, 16], "above 16": [17, 31, 33], "above 64": [65, 80, 127]}),
        Axis("query", {"1": [1], "2 to 4": [2, 3, 4], "5 to 8": [5, 6, 7, 8], "above 8": [9, 12, 16, 17]}),
        Axis("bias", {"with": [True], "without": [False]}),
    ]


_WIDTHS = {"1": [1], "2": [2], "3": [3], "4": [4], "above 4": [5, 6, 8]}
_JOURNALS = {
    "1 to 7": [1, 2, 3, 4, 5, 6, 7],
    "8 to 16": [8, 11, 16],
    "17 to 64": [17, 32, 48, 64],
    "above 64": [65, 100],
}
_GROUPS = {"1": [1], "2": [2], "3": [3], "4": [4], "above 4": [5, 6]}


def _spec(base: StateSpec, values: Values) -> StateSpec:
    """Return the plain spec with these values."""
    names = ("recurrence", "dtype", "state_dtype", "key_dim", "value_dim", "conv_width", "journal")
    heads = values.get("num_key_heads", base.num_key_heads or 1)
    changes = {name: values[name] for name in names if name in values}
    value_heads = heads * values.get("group_size", base.group_size)
    return varied(base, num_key_heads=heads, num_value_heads=value_heads, **changes)
