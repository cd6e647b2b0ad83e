"""A bound on a timing, evaluated by the bench and shown by the matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class TimingLimit(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A bound on a column of a timing. met: None if the column was not measured. In a file, an array."""

    column: str
    bound: float
    at_least: bool = False
    met: bool | None = None

    @property
    def text(self) -> str:
        return f"{self.column} {'>=' if self.at_least else '<='} {self.bound:g}"

    def judged(self, row: Mapping[str, Any]) -> TimingLimit:
        """Evaluate the limit on a row, by its median if the column has quantiles."""
        found = row.get(self.column)
        value = found["p50"] if isinstance(found, dict) else found
        met = None if value is None else bool(value >= self.bound if self.at_least else value <= self.bound)
        return msgspec.structs.replace(self, met=met)


def verdict(limits: Sequence[TimingLimit]) -> tuple[str, bool | None]:
    """Return the limits as text and whether all are met: False if one is missed, None if one is open or none given."""
    met = {limit.met for limit in limits}
    text = " and ".join(limit.text for limit in limits)
    return text, None if not met else False if False in met else None if None in met else True
