"""Shared by the pages: how to read them, columns in groups, numbered reasons, timings as lines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from spec_decode.matrix.cells import OLDER, Cell, Note, Status
from spec_decode.matrix.columns import Column
from spec_decode.matrix.drafters import DraftCell
from spec_decode.matrix.speed import Bar
from spec_decode.matrix.text import counted
from spec_decode.tools.timing_limit import verdict

HOW_TO_READ = (
    "What each backend claims, and what its checks showed. A count such as 72/72 is checks passed of checks run, "
    "without rejections; 0.4x means that the worst error was 0.4 of its budget, which is twice the error of a "
    "low-precision reference. Runs are never averaged: 67/67 + 1/1 are the checks of two runs. The newest result of "
    f"each check counts, and earlier ones that disagree follow. {OLDER} marks evidence from older source: it is dated, "
    "not withdrawn."
)
_REFUSALS_ONLY = frozenset({Status.REFUSED, Status.UNKNOWN, Status.CLAIMED})
"""Cells whose notes are rejections at most: one reason is enough."""


class Notes:
    """Numbers for reasons in order of first use; the same outcome with the same reason has one number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], tuple[Note, int]] = {}

    @property
    def all(self) -> dict[Note, int]:
        """Each reason as it was first seen, with its number."""
        return dict(self._numbers.values())

    def marks(self, cell: Cell) -> list[str]:
        """Return marks for the numbers of a cell's reasons: all failures, or the first rejection."""
        notes = [
            note
            for evidence in (*cell.evidence, *(cell.earlier if cell.conflict else ()))
            for note in evidence.notes[: 1 if evidence.status in _REFUSALS_ONLY else None]
        ]
        return list(dict.fromkeys(f"^{self._number(note)}" for note in notes))

    def _number(self, note: Note) -> int:
        key = (note.outcome, note.reason)
        return self._numbers.setdefault(key, (note, len(self._numbers) + 1))[1]


def grouped(columns: Sequence[Column]) -> list[tuple[str, list[Column]]]:
    """Return the titles of the groups with their columns."""
    return [(title, list(found)) for title, found in groupby(columns, key=lambda column: column.group)]


def age_text(changed: Sequence[str]) -> str:
    """Say that the source was older; empty if it was not."""
    return f"from older source ({counted(len(changed), 'file')} changed)" if changed else ""


def draft_lines(cell: DraftCell | None) -> list[str]:
    """Describe a drafter's cell: its status, parity and kept tokens by shape, the first host time, or the rejection."""
    if cell is None:
        return [Status.UNKNOWN.value]
    lines = [cell.status.value + (OLDER if cell.changed else "")] + [
        f"K {found.num_speculative_tokens}, T {found.temperature:g}: "
        f"{found.unlike_eager} of {counted(found.prompts, 'prompt')} differ from eager"
        + (f", {found.unlike_plain} from plain decoding" if found.unlike_plain is not None else "")
        + (f", {found.unlike_alone} from running alone" if found.unlike_alone is not None else "")
        + (f", {found.accepted:.2f} tokens accepted" if found.accepted is not None else "")
        for found in cell.parity
    ]
    lines += [
        f"host {host.us.p50:.0f} us [{host.us.p20:.0f} to {host.us.p80:.0f}] per round, "
        f"{counted(host.num_reqs, 'request')}, K {host.num_speculative_tokens}"
        for host in cell.host[:1]
    ]
    return lines + ([cell.refusal] if cell.refusal else [])


def time_text(bar: Bar) -> str:
    """Format the median and range."""
    if bar.us is None:
        return "no launch"
    return f"{bar.us.p50:.4g} [{bar.us.p20:.4g} to {bar.us.p80:.4g}]"


def verdict_text(bar: Bar) -> str:
    """Format the limits, and whether they are met."""
    limits, met = verdict(bar.limits)
    return limits and f"{limits}: {'met' if met else 'not judged' if met is None else 'missed'}"
