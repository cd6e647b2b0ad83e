"""A question to the matrix, in the words of a spec: which attention, drafted how, over which batches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import msgspec

from builders import AttentionKind, AttentionSpec
from spec_decode.conformance.case_records import SpecRecord
from spec_decode.drafter import Strategy
from spec_decode.matrix.axes import Value

OFF: dict[str, Value] = {
    "kind": AttentionKind.MHA.value,
    "value dim": None,
    "kv dtype": None,
    "window": None,
    "soft cap": None,
    "sinks": False,
    "batch invariant": False,
    "blocks": False,
    "trees": False,
    "head scales": False,
}
"""What an attention has unless a word says otherwise: the defaults of an AttentionSpec."""
_DTYPES = {
    **{name: name for name in ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")},
    **{"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"},
    **{"fp8": "float8_e4m3fn", "fp8 e4m3": "float8_e4m3fn", "fp8 e5m2": "float8_e5m2"},
}
_QUERY_DTYPES = ("fp32", "fp16", "bf16", "float32", "float16", "bfloat16")


class QuestionError(ValueError):
    """The words make no question; the message names the wrong one and lists those that do."""


@dataclass(frozen=True, slots=True)
class Question:
    """What was asked. values: axis -> value, of every axis that matters: those named, and those of OFF.

    Axes that are neither, such as the head dim if no word gives it, may have any value.
    """

    text: str
    values: Mapping[str, Value]
    named: tuple[str, ...]
    """The axes that words named, in their order."""

    @classmethod
    def of(cls, text: str) -> Question:
        """Parse words separated by commas. Raises QuestionError for a word that is unknown or given twice, and for
        words that no spec can have together."""
        named: dict[str, Value] = {}
        for words in filter(None, (" ".join(part.split()).lower() for part in text.split(","))):
            for axis, value in _parsed(words).items():
                if axis in named:
                    raise QuestionError(f"{axis} is given twice, the second time as {words!r}. Give it once.")
                named[axis] = value
        if not named:
            raise QuestionError(f"a question needs words, such as {EXAMPLE!r}. {_known()}")
        _require_consistent(named)
        question = cls(text, {**OFF, **named}, tuple(named))
        next(specs_of(question))
        return question

    def describe(self) -> str:
        """Return what was understood, as one line: the named axes, then those that are off, which no word named."""
        off = [f"no {axis}" for axis, value in OFF.items() if axis not in self.named and value in (None, False)]
        off = [each for each in off if each not in ("no value dim", "no kv dtype", "no head scales")]
        kind = [] if "kind" in self.named else [str(OFF["kind"])]
        return ", ".join([*(worded(axis, self.values[axis]) for axis in self.named), *kind, *off])


def worded(axis: str, value: object) -> str:
    """Return an axis with its value in the words of a question."""
    if isinstance(value, bool) or value is None:
        return axis if value else f"no {axis}"
    if axis in ("kind", "dtype", "mode", "strategy"):
        return str(value)
    return f"{axis} {value:g}" if isinstance(value, float) else f"{axis} {value}"


_Parser = Callable[[re.Match[str]], dict[str, Value]]


def _count(axis: str) -> _Parser:
    def parse(match: re.Match[str]) -> dict[str, Value]:
        return {axis: int(match[1])}

    return parse


def _factor(axis: str) -> _Parser:
    def parse(match: re.Match[str]) -> dict[str, Value]:
        return {axis: float(match[1])}

    return parse


def _fixed(axis: str, value: Value) -> _Parser:
    return lambda match: {axis: value}


def _heads(match: re.Match[str]) -> dict[str, Value]:
    kv: dict[str, Value] = {"kv heads": int(match[2])} if match[2] else {}
    return {"heads": int(match[1]), **kv}


def _dims(match: re.Match[str]) -> dict[str, Value]:
    other: dict[str, Value] = {"value dim": int(match[2])} if match[2] and match[2] != match[1] else {}
    return {"dim": int(match[1]), **other}


_N, _X = r"([1-9]\d{0,8})", r"(\d{1,9}(?:\.\d{1,9})?|\.\d{1,9})"
_NAMES = "|".join(sorted(_DTYPES, key=len, reverse=True))
_WORDS: dict[str, tuple[str, _Parser]] = {
    "window 4096": (rf"window {_N}", _count("window")),
    "heads 32/4": (rf"heads {_N}(?:/{_N})?", _heads),
    "32/4 heads": (rf"{_N}(?:/{_N})? heads", _heads),
    "kv heads 4": (rf"kv heads {_N}", _count("kv heads")),
    "group 8": (rf"group {_N}", _count("group")),
    "dim 128": (rf"dim {_N}(?:/{_N})?", _dims),
    "page 16": (rf"page {_N}", _count("page")),
    "bf16": (rf"({'|'.join(_QUERY_DTYPES)})", lambda match: {"dtype": _DTYPES[match[1]]}),
    "kv fp8": (rf"kv ({_NAMES})", lambda match: {"kv dtype": _DTYPES[match[1]]}),
    "scale 0.1": (rf"scale {_X}", _factor("scale")),
    "soft cap 30": (rf"(?:soft )?cap {_X}", _factor("soft cap")),
    "sinks": ("sinks", _fixed("sinks", True)),
    "mha": ("mha", _fixed("kind", "mha")),
    "mla": ("mla", _fixed("kind", "mla")),
    "batch invariant": ("batch[ -_]invariant", _fixed("batch invariant", True)),
    "blocks": ("blocks|not causal", _fixed("blocks", True)),
    "trees": ("trees?", _fixed("trees", True)),
    "head scales": ("head[ -_]scales", _fixed("head scales", True)),
    **{
        f"no {axis}": (f"no {words}", _fixed(axis, OFF[axis]))
        for axis, words in {"window": "window", "soft cap": "(?:soft )?cap", "sinks": "sinks"}.items()
    },
    **{mode: (mode, _fixed("mode", mode)) for mode in ("prefill", "extend", "decode", "verify")},
    **{
        name: (name.replace(" ", "[ _-]"), _fixed("strategy", name))
        for name in (strategy.value.replace("_", " ") for strategy in Strategy)
    },
    "rows 64": (rf"rows {_N}", _count("rows")),
    "length 8192": (rf"length {_N}", _count("length")),
}
"""An example of each word -> its pattern and its parser."""
EXAMPLE = "window 4096, heads 32/4, dim 128, page 16, bf16, full loop"


def _parsed(words: str) -> dict[str, Value]:
    for pattern, parse in _WORDS.values():
        if match := re.fullmatch(pattern, words):
            return parse(match)
    raise QuestionError(f"{words[:60]!r} is no word of a spec. {_known()}")


def _known() -> str:
    return f"Words are {', '.join(_WORDS)}; separate them by commas."


def _require_consistent(named: dict[str, Value]) -> None:
    """Drop a KV dtype that is the dtype. Raises QuestionError if heads, KV heads and group contradict one another."""
    heads, kv, group = (named.get(axis) for axis in ("heads", "kv heads", "group"))
    if isinstance(heads, int) and isinstance(group, int) and heads % group:
        raise QuestionError(
            f"{heads} query heads are no multiple of a group of {group}. Use a group that divides them."
        )
    if isinstance(heads, int) and isinstance(kv, int):
        if heads % kv:
            raise QuestionError(f"{heads} query heads are no multiple of {kv} KV heads. Use KV heads that divide them.")
        if group not in (None, heads // kv):
            raise QuestionError(f"heads {heads}/{kv} make a group of {heads // kv}, but group is {group}. Drop one.")
    if named.get("kv dtype") is not None and named["kv dtype"] == named.get("dtype"):
        named["kv dtype"] = None


_DTYPES_TRIED = ("bfloat16", "float16", "float32")
_PAGES_TRIED = (16, 64, 32, 128, 256, 1)
_DIMS_TRIED = ((128, None), (64, None), (576, 512), (512, None), (256, None), (192, 128), (80, 64))
_KV_HEADS_TRIED = (4, 8, 2, 1)
_GROUPS_TRIED = (8, 4, 16, 64, 128, 2, 1)


def specs_of(question: Question) -> Iterator[AttentionSpec]:
    """Yield specs that have what was asked, with common values of the axes that were not. Raises QuestionError if no
    spec can have it."""
    values, kind = question.values, AttentionKind(question.values["kind"])
    dims: list[tuple[Value, Value]] = [(values.get("dim"), values["value dim"])]
    if "dim" not in values:
        dims = [(dim, values["value dim"] or value) for dim, value in _DIMS_TRIED]
    problem, possible = "", False
    dtypes, pages = ((values[axis],) if axis in values else tried for axis, tried in _TRIED.items())
    for dtype, page, (dim, value_dim), (heads, kv_heads) in product(dtypes, pages, dims, _heads_tried(values, kind)):
        record = {
            **{"num_q_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "value_dim": value_dim},
            **{"page_size": page, "dtype": dtype, "kv_dtype": values["kv dtype"], "kind": kind.value},
            **{"sliding_window": values["window"], "scale": values.get("scale"), "soft_cap": values["soft cap"]},
            **{"sinks": values["sinks"], "causal": not values["blocks"], "tree": values["trees"]},
            **{"batch_invariant": values["batch invariant"], "head_scales": values["head scales"]},
        }
        try:
            spec = msgspec.convert(record, SpecRecord).spec()
        except msgspec.ValidationError as error:  # its __post_init__ makes the spec
            problem = str(error)
        else:
            possible = True
            yield spec
    if not possible:
        raise QuestionError(f"{problem or 'no head counts fit'}. Fix the question.")


_TRIED: dict[str, tuple[Value, ...]] = {"dtype": _DTYPES_TRIED, "page": _PAGES_TRIED}


def _heads_tried(values: Mapping[str, Value], kind: AttentionKind) -> list[tuple[int, int]]:
    """Return query heads with KV heads; latents have one KV head."""
    one = (1,) if kind is AttentionKind.MLA else _KV_HEADS_TRIED
    heads, kv, group = (values.get(axis) for axis in ("heads", "kv heads", "group"))
    if isinstance(heads, int):
        found = [kv] if isinstance(kv, int) else [heads // group] if isinstance(group, int) else [*one, heads]
        return [(heads, each) for each in found if each and heads % each == 0]
    groups = [group] if isinstance(group, int) else _GROUPS_TRIED
    return [(each * size, each) for size, each in product(groups, [kv] if isinstance(kv, int) else one)]
