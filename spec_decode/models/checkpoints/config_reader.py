"""Typed access to config.json, in which any field can be absent and null means absent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, cast

from spec_decode.models.checkpoints.files import CheckpointError

T = TypeVar("T", int, float, bool, str, "list[Any]", "dict[str, Any]")

_WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "an object",
}

_LIMITS: dict[type, float] = {int: 2.0**31, float: 2.0**127}
"""Exclusive bounds of absolute values, against sizes that no machine can allocate and JSON's infinity and NaN."""


class ConfigReader:
    """The fields of one JSON object."""

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        """place: the object's name in messages."""
        self.values, self.place = values, place

    def get(self, name: str, kind: type[T], default: T | None = None) -> T:
        """Return a field of this type. Raises CheckpointError for another type, or if absent without a default."""
        value = self.values.get(name, default)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self.place} lacks {name}, {_WORDS[kind]}. Restore the file.")
        return _checked(value, kind, f"{name} in {self.place}")

    def optional(self, name: str, kind: type[T]) -> T | None:
        """Return a field of this type, or None if it is absent."""
        return None if self.values.get(name) is None else self.get(name, kind)

    def positive(self, name: str, default: float | None = None) -> float:
        """Return a field as a positive number. Raises CheckpointError for any other value."""
        value = self.get(name, float, default)
        if not value > 0:
            raise CheckpointError(f"{name} in {self.place} must be positive, got {value}. Restore the file.")
        return value

    def require(self, name: str, expected: bool | str | float) -> None:
        """Raise CheckpointError for a field with any other value; it can be absent."""
        if (value := self.values.get(name, expected)) not in (expected, None):
            raise CheckpointError(
                f"{name} in {self.place} must be {expected!r}, got {value!r}, which is not supported. "
                "Use another checkpoint."
            )

    def section(self, name: str) -> ConfigReader:
        """Return a reader of the object in this field, or of an empty one if it is absent."""
        inner: dict[str, Any] = self.get(name, cast(Any, dict), {})
        return ConfigReader(inner, f"{name} in {self.place}")


def _checked(value: Any, kind: type[T], name: str) -> T:
    if isinstance(value, int | float) and kind in _LIMITS and not abs(value) < (limit := _LIMITS[kind]):
        raise CheckpointError(
            f"{name} must be a number between {-limit:g} and {limit:g}, got {value!r}. Restore the file."
        )
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    # JSON's true is an int to Python.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise CheckpointError(f"{name} must be {_WORDS[kind]}, got {value!r}. Restore the file.")
    return value
