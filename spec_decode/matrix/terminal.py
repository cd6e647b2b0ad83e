"""The matrix for a terminal. The text carries the meaning; colour repeats it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spec_decode.matrix.cells import OLDER, Cell, Note, Status
from spec_decode.matrix.columns import Column, grouped
from spec_decode.matrix.covered import AXES, UNRECORDED, Covered, shown
from spec_decode.matrix.drafters import DraftCell
from spec_decode.matrix.model import Matrix, MatrixRow
from spec_decode.matrix.text import counted, note_text, plain, plain_lines

_STYLES = {
    Status.VERIFIED: "green",
    Status.BROKEN: "bold red",
    Status.PARTIAL: "yellow",
    Status.UNCLAIMED: "cyan",
    Status.UNKNOWN: "dim",
}

_REFUSALS_ONLY = frozenset({Status.REFUSED, Status.UNKNOWN, Status.CLAIMED})
"""Cells whose notes are rejections at most: one reason is enough."""


class _Notes:
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


def to_table(matrix: Matrix) -> RenderableType:
    """Render a table for each group of columns, why rows are stale, the drafters, the numbered reasons, and the
    runs."""
    notes = _Notes()
    tables: list[RenderableType] = [_group(matrix, title, found, notes) for title, found in grouped(matrix.columns)]
    tables = tables or [_table("no evidence", ["backend"])]
    tables += [_stale(matrix)] if any(row.stale for row in matrix.rows) else []
    tables += [_drafters(matrix)] if matrix.drafters else []
    tables += [_reasons(notes)] if notes.all else []
    tables += [_runs(matrix)] if matrix.runs else []
    return Group(*tables)


def covered_table(found: Covered) -> RenderableType:
    """Render a table for each version of the backend on a device."""
    tables = []
    for each in found.backends:
        dates = ", ".join(dict.fromkeys(date[:10] for date in each.dates))
        title = f"{plain(each.backend)}@{plain(each.version)} on {plain(each.device)}, {dates}: passed checks covered"
        title += f" ({UNRECORDED}: not recorded)" if each.columns else " only recurrent states; see --tag 'state*'"
        table = _table(title, ["column", "passed", *AXES])
        for one in each.columns:
            passed = str(one.passed) if one.passed else "claimed" if one.claimed else "0"
            table.add_row(*(Text(plain(cell)) for cell in (one.column.label, passed, *(shown(one, a) for a in AXES))))
        tables.append(table)
    return Group(*tables)


def _table(title: str, columns: Iterable[str]) -> Table:
    table = Table(title=Text(title), box=box.ASCII2, title_justify="left", show_lines=False)
    for column in columns:
        table.add_column(Text(plain(column)), overflow="fold")
    return table


def _group(matrix: Matrix, title: str, columns: Sequence[Column], notes: _Notes) -> Table:
    table = _table(plain(title), ["backend", *(column.label for column in columns)])
    for row in matrix.rows:
        table.add_row(_who(row), *(_cell(row.cells[column.tag], notes) for column in columns))
    return table


def _who(row: MatrixRow) -> Text:
    stale = " (stale)" if row.stale else ""
    return Text(f"{plain(row.title)}{stale}\n{plain(row.device)}", style="dim" if row.stale else "")


def _stale(matrix: Matrix) -> RenderableType:
    lines = (f"{plain(row.title)} on {plain(row.device)}: {plain(why)}" for row in matrix.rows for why in row.stale)
    return Text("\n".join(["Stale", *lines, ""]))


def _cell(cell: Cell, notes: _Notes) -> Text:
    return Text(" ".join([plain(cell.text), *notes.marks(cell)]), style=_STYLES.get(cell.status, ""))


def _drafters(matrix: Matrix) -> Table:
    table = _table("Drafters: tokens accepted and host time per round", ["draft", "backend", *matrix.strategies])
    for row in matrix.drafters:
        where = Text(f"{plain(row.backend)}\n{plain(row.dtype)}, {plain(row.device)}")
        table.add_row(Text(plain(row.draft)), where, *map(_draft_cell, row.in_order(matrix.strategies)))
    return table


def _draft_cell(cell: DraftCell | None) -> Text:
    style = _STYLES.get(cell.status if cell else Status.UNKNOWN, "")
    return Text("\n".join(map(plain, _draft_lines(cell))), style=style)


def _draft_lines(cell: DraftCell | None) -> list[str]:
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


def _reasons(notes: _Notes) -> RenderableType:
    text = Text("Reasons\n")
    for note, number in notes.all.items():
        text.append(f"^{number} {' / '.join(plain_lines(note_text(note)))}\n")
        if note.repro:
            text.append(f"    {plain(note.repro)}\n", style="dim")
    return text


def _runs(matrix: Matrix) -> Table:
    table = _table("Runs", ["run", "what", "device", "software", "commit", "date"])
    for number, run in enumerate(matrix.runs, 1):
        software = f"torch {run.env.torch}, triton {run.env.triton}"
        cells = (str(number), run.subject, run.env.device, software, run.commit, run.env.date)
        table.add_row(*(Text(plain(cell)) for cell in cells))
    return table
