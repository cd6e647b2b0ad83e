"""Errors of the ground floor. Each says the requirement, what was found, what follows, and what to do."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from difflib import get_close_matches
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch


class BatchError(ValueError):
    """A value, a setting or a batch that must not reach a kernel; the message says what to change."""


def require(condition: bool, message: str) -> None:
    """Raise BatchError(message) unless condition holds."""
    if not condition:
        raise BatchError(message)


def did_you_mean(asked: str, known: Iterable[str]) -> str:
    """A question to append to an error, empty where nothing known resembles what was asked for."""
    close = get_close_matches(asked, list(known), 1)
    return f" Did you mean {close[0]}?" if close else ""


def require_counts(name: str, values: Iterable[object]) -> None:
    """Raise BatchError unless every value is an int, and no bool: a tensor would round or count another in silence."""
    if wrong := [value for value in values if type(value) is not int]:
        raise BatchError(f"{name} must be ints, got {wrong[0]!r}; a tensor would hold another number. Convert it.")


def type_problems(record: object) -> list[str]:
    """What is wrong with a dataclass's values by its annotations. A bool is no int, and a float may be an int but must
    be finite; of a collection only its own type is looked at."""
    hints = _hints(type(record))  # type: ignore[arg-type]
    return [
        f"{name} must be {_describe(hint)}, got {value!r}"
        for name, hint in hints.items()
        if not _has_type(value := getattr(record, name), hint)
    ]


def require_types(record: object) -> None:
    """Raise BatchError, with every problem, for a dataclass whose values do not have the types of its annotations."""
    if problems := type_problems(record):
        raise BatchError(f"{'; '.join(problems)}.")


@cache
def _hints(record: Hashable) -> dict[str, Any]:
    return get_type_hints(record)


def _has_type(value: object, hint: Any) -> bool:
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        return any(_has_type(value, one) for one in get_args(hint))
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    return type(value) is int if hint is int else isinstance(value, get_origin(hint) or hint)


def _describe(hint: Any) -> str:
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        return " or ".join(_describe(one) for one in get_args(hint))
    names = {int: "an int", float: "a finite number", bool: "True or False", str: "a string", type(None): "None"}
    return names.get(hint, f"of type {hint.__qualname__}")


def require_tensor(
    name: str, tensor: torch.Tensor, *, shape: Iterable[int | None], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise BatchError unless a tensor has this shape (None matches any size), this dtype and is on this device.

    A device without an index matches every one of its type.
    """
    wanted, found = tuple(shape), tuple(tensor.shape)
    fits = len(wanted) == len(found) and all(w in (None, f) for w, f in zip(wanted, found, strict=True))
    if not fits or tensor.dtype != dtype or not _same_device(tensor.device, device):
        raise BatchError(
            f"{name} must be {dtype} {list(wanted)} on {device}, got {tensor.dtype} {list(found)} on "
            f"{tensor.device}; a kernel would read it as something else. Convert it first."
        )


def _same_device(found: torch.device, wanted: torch.device) -> bool:
    return found == wanted or (found.type == wanted.type and None in (found.index, wanted.index))
