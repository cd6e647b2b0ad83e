"""The matrix as Markdown: a table for each group of columns, the drafters, the timings, reasons and provenance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spec_decode.matrix.cells import OLDER, Note, Status
from spec_decode.matrix.model import Matrix, MatrixRow
from spec_decode.matrix.numbered import HOW_TO_READ, Notes, draft_lines, grouped, time_text, verdict_text
from spec_decode.matrix.speed import Bar
from spec_decode.matrix.text import markdown, markdown_code, markdown_table, note_text

_PROVENANCE = ("run", "what", "device", "driver", "CUDA", "torch", "triton", "python", "platform", "commit", "date")


def to_markdown(matrix: Matrix) -> str:
    """Render everything that the JSON holds except the evidence of single cases."""
    notes = Notes()
    legend = _table(["status", "meaning"], [[status.value, status.meaning] for status in Status])
    parts = ["# Compatibility", HOW_TO_READ, legend]
    for title, columns in grouped(matrix.columns):
        rows = []
        for row in matrix.rows:
            cells = [row.cells[column.tag] for column in columns]
            rows.append([*_who(row), *(" ".join([cell.text, *notes.marks(cell)]) for cell in cells)])
        parts += [f"## {markdown(title)}", _table(["backend", "device", *(c.label for c in columns)], rows)]
        meanings = [f"{markdown(c.label)}: {markdown(c.meaning)}" for c in columns if c.meaning]
        parts += ["\n".join(f"- {line}" for line in meanings)] if meanings else []
    stale = [
        f"- {markdown(row.title)} on {markdown(row.device)}: {markdown(r)}" for row in matrix.rows for r in row.stale
    ]
    parts += ["## Stale", "\n".join(stale)] if stale else []
    parts += _drafters(matrix)
    parts += _speed(matrix)
    if notes.all:
        parts += ["## Reasons", "\n".join(_reason(number, note) for note, number in notes.all.items())]
    parts += ["## Provenance", _provenance(matrix)]
    return "\n\n".join(parts) + "\n"


def _who(row: MatrixRow) -> list[str]:
    runs = ", ".join(f"run {run + 1}" for run in row.runs)
    return [row.title + (" (stale)" if row.stale else ""), f"{row.device} ({runs})"]


def _drafters(matrix: Matrix) -> list[str]:
    rows = []
    for row in matrix.drafters:
        cells = ["\n".join(draft_lines(cell)) for cell in row.in_order(matrix.strategies)]
        where = f"{row.device} (run {row.cells[0].run + 1})"
        rows.append([row.draft, f"{row.backend}\n{row.dtype}", where, *cells])
    header = ["draft model", "backend", "device", *matrix.strategies]
    return ["## Drafters", _table(header, rows)] if rows else []


def _speed(matrix: Matrix) -> list[str]:
    parts: list[str] = []
    for section in matrix.speed:
        rows = [[panel.title, *_timing(bar), f"run {bar.run + 1}"] for panel in section.panels for bar in panel.bars]
        header = ["shape", "what", f"{section.quantity}: p50 [p20 to p80]", "floor", "limit", "run"]
        title = ", ".join(filter(None, [section.title, section.spec, section.device]))
        parts += [f"### {markdown(title)}", _table(header, rows)]
    return ["## Speed", *parts] if parts else []


def _timing(bar: Bar) -> list[str]:
    what = f"{bar.label}{' (peer)' if bar.peer else ''}{OLDER if bar.changed else ''}\n{bar.spec}".strip()
    return [what, time_text(bar), "" if bar.floor is None else f"{bar.floor:.4g}", verdict_text(bar)]


def _reason(number: int, note: Note) -> str:
    return f"{number}. {markdown(note_text(note))}{f'<br>{markdown_code(note.repro)}' if note.repro else ''}"


def _provenance(matrix: Matrix) -> str:
    rows = []
    for number, run in enumerate(matrix.runs, 1):
        env = run.env
        software = [env.driver or "none", env.cuda or "none", env.torch, env.triton, env.python, env.platform]
        rows.append([str(number), run.subject, env.device, *software, run.commit, env.date])
    commands = [f"{number}. {markdown_code(run.command)}" for number, run in enumerate(matrix.runs, 1) if run.command]
    repeat = ["The commands of these runs:", "\n".join(commands)] if commands else []
    return "\n\n".join([_table(_PROVENANCE, rows), *repeat])


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head, *cells = [[markdown(text) for text in row] for row in (header, *rows)]
    return markdown_table(head, cells)
