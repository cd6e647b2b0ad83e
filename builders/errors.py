"""Input errors and the checks that raise them. Messages give the requirement, the value and a fix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch


class BatchError(ValueError):
    """An invalid value, setting or batch that must not reach a kernel; the message says what to change."""


def require(condition: bool, message: str) -> None:
    """Raise BatchError(message) unless condition holds."""
    if not condition:
        raise BatchError(message)


def require_type(name: str, value: object, kind: type) -> None:
    """Raise BatchError unless the value of the argument `name` is a `kind`."""
    require(
        isinstance(value, kind),
        f"{name} must be of type {kind.__name__}, got {type(value).__name__}. "
        f"Pass an instance, such as {kind.__name__}(...).",
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a suggestion to append to an error; empty if no known name is close."""
    close = get_close_matches(name, list(known), 1)
    return f" Did you mean {close[0]}?" if close else ""


def require_counts(name: str, values: Iterable[object]) -> None:
    """Raise BatchError unless every value is an int and not a bool: a tensor would silently convert anything else."""
    if wrong := [value for value in values if type(value) is not int]:
        raise BatchError(f"{name} must be ints, got {wrong[0]!r}; a tensor would change the value. Pass an int.")


def type_problems(record: object) -> list[str]:
    """List a dataclass's values that do not match their annotations. A bool is not an int; a float can be given as an
    int but must be finite; of a collection only the container type is checked."""
    fields = _field_types(type(record))  # type: ignore[arg-type]
    return [
        f"{name} must be {' or '.join(map(_describe, types))}, got {value!r}"
        for name, types in fields.items()
        if not any(_has_type(value := getattr(record, name), kind) for kind in types)
    ]


def require_types(record: object) -> None:
    """Raise BatchError, listing every problem, if a dataclass's values do not match its annotations."""
    if problems := type_problems(record):
        raise BatchError(f"{'; '.join(problems)}.")


@cache
def _field_types(record: type) -> dict[str, tuple[Any, ...]]:
    """Return the types that each field can have. Cached per class: a spec is checked thousands of times."""
    return {name: tuple(_alternatives(hint)) for name, hint in get_type_hints(record).items()}


def _alternatives(hint: Any) -> Iterator[Any]:
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        for member in get_args(hint):
            yield from _alternatives(member)
    else:
        yield get_origin(hint) or hint


def _has_type(value: object, wanted: Any) -> bool:
    if wanted is float:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    return type(value) is int if wanted is int else isinstance(value, wanted)


def _describe(wanted: Any) -> str:
    names = {int: "an int", float: "a finite number", bool: "True or False", str: "a string", type(None): "None"}
    return names.get(wanted, f"of type {wanted.__qualname__}")


def require_tensor(
    name: str, tensor: torch.Tensor, *, shape: Iterable[int | None], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise BatchError unless a tensor has this shape (None matches any size), dtype and device.

    A device without an index matches every device of its type.
    """
    wanted, found = tuple(shape), tuple(tensor.shape)
    fits = len(wanted) == len(found) and all(want in (None, size) for want, size in zip(wanted, found, strict=True))
    if not fits or tensor.dtype != dtype or not _same_device(tensor.device, device):
        raise BatchError(
            f"{name} must be {dtype} {list(wanted)} on {device}, got {tensor.dtype} {list(found)} on {tensor.device}; "
            "a kernel would misread it. Reshape it, or copy it with .to(dtype, device)."
        )


def require_vector(
    name: str, vector: torch.Tensor, *, length: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise BatchError unless a tensor is contiguous and [length], with this dtype and device (see
    `require_tensor`)."""
    require_tensor(name, vector, shape=(length,), dtype=dtype, device=device)
    if not vector.is_contiguous():
        raise BatchError(
            f"{name} must be contiguous, got stride {vector.stride(0)}; a kernel would read the gaps. Make it "
            "contiguous first."
        )


def _same_device(found: torch.device, wanted: torch.device) -> bool:
    return found == wanted or (found.type == wanted.type and None in (found.index, wanted.index))
