"""The compatibility matrix: what each backend claims and what was seen, as pure functions of the reports."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from rich import box
from rich.table import Table
from rich.text import Text

from spec_decode.cells import Cell, Claim, Note, Word, cell_of
from spec_decode.report import FAMILIES, Environment, Report, json_bytes, json_number

__all__ = [
    "SCHEMA",
    "Cell",
    "Claim",
    "Claims",
    "Matrix",
    "Note",
    "Row",
    "Word",
    "build_matrix",
    "cell_of",
    "to_json",
    "to_markdown",
    "to_table",
]

SCHEMA = "attn-matrix/1"
_STYLES = {
    Word.VERIFIED: "green",
    Word.BROKEN: "bold red",
    Word.PARTIAL: "yellow",
    Word.UNCLAIMED: "cyan",
    Word.UNKNOWN: "dim",
}
_PROVENANCE = ("row", "device", "driver", "CUDA", "torch", "triton", "python", "platform", "commit", "date")
_SPECIAL = re.compile(r"[\\|`*\[\]~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
"""What Markdown would read as markup; an underscore inside a word is none."""


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One report. cells: in the order of the matrix's columns."""

    backend: str
    version: str
    env: Environment
    command: str
    cells: tuple[Cell, ...]


class Matrix(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reports as rows, check families and claims as columns."""

    schema: str = SCHEMA
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


Claims = Mapping[str, Mapping[str, Claim]]
"""Backend name -> column -> claim. A column that is no check family is shown as a claim without evidence."""


def build_matrix(reports: Sequence[Report], claims: Claims | None = None) -> Matrix:
    """One row per report, by backend and device, newest first; nothing is averaged or dropped."""
    claims = claims or {}
    families = [result.family for report in reports for result in report.results]
    claimed = [column for of_backend in claims.values() for column in of_backend]
    columns = tuple(dict.fromkeys([*FAMILIES, *families, *claimed]))
    newest_first = sorted(reports, key=lambda report: report.env.date, reverse=True)
    ordered = sorted(newest_first, key=lambda report: (report.backend, report.env.device))
    return Matrix(columns=columns, rows=tuple(_row(report, columns, claims) for report in ordered))


def _row(report: Report, columns: Iterable[str], claims: Claims) -> Row:
    own = claims.get(report.backend, {})
    cells = [
        cell_of([result for result in report.results if result.family == column], own.get(column)) for column in columns
    ]
    return Row(
        backend=report.backend,
        version=report.version,
        env=report.env,
        command=report.command,
        cells=tuple(cells),
    )


def to_json(matrix: Matrix) -> bytes:
    """Indented, in a stable order; a worst error that is no number is written as its name."""
    document = msgspec.to_builtins(matrix)
    for row in document["rows"]:
        for cell in row["cells"]:
            cell["worst"] = None if cell["worst"] is None else json_number(cell["worst"])
    return json_bytes(document)


def to_table(matrix: Matrix) -> Table:
    """For a terminal. Words carry the meaning, colour repeats it; the notes are the caption."""
    numbers = _note_numbers(matrix)
    caption = "\n".join(f"^{n} {' / '.join(_lines(_note_text(note)))}" for note, n in numbers.items())
    table = Table(box=box.ASCII2, show_lines=True, caption=Text(caption) if caption else None, caption_justify="left")
    table.add_column("backend", overflow="fold")
    for column in matrix.columns:
        table.add_column(Text(column))
    for row in matrix.rows:
        who = f"{row.backend}@{row.version}\n{row.env.device}\n{row.env.date}\n{_commit(row.env)}"
        cells = [Text(_marked(cell, numbers), style=_STYLES.get(cell.word, "")) for cell in row.cells]
        table.add_row(Text("\n".join(_lines(who))), *cells)
    return table


def to_markdown(matrix: Matrix) -> str:
    """The matrix, each row's provenance, and the numbered reasons with the commands that repeat them."""
    numbers = _note_numbers(matrix)
    cells = [
        [
            str(n),
            f"{row.backend}@{row.version}",
            row.env.device,
            *(_marked(cell, numbers) for cell in row.cells),
        ]
        for n, row in enumerate(matrix.rows, 1)
    ]
    parts = [
        _markdown_table(["row", "backend", "device", *matrix.columns], cells),
        "3/4: checks passed of those that apply. 0.5x: the worst error is half its budget. ^1: see note 1.",
        "## Provenance",
        _markdown_table(_PROVENANCE, [_provenance(n, row.env) for n, row in enumerate(matrix.rows, 1)]),
    ]
    if numbers:
        notes = [
            f"{n}. {_escape(_note_text(note))}{f'<br>{_code(note.repro)}' if note.repro else ''}"
            for note, n in numbers.items()
        ]
        parts += ["## Notes", "\n".join(notes)]
    return "\n\n".join(parts) + "\n"


def _note_numbers(matrix: Matrix) -> dict[Note, int]:
    notes = dict.fromkeys(note for row in matrix.rows for cell in row.cells for note in cell.notes)
    return {note: number for number, note in enumerate(notes, 1)}


def _note_text(note: Note) -> str:
    more = f" and {note.count - 1} more" if note.count > 1 else ""
    return f"{note.outcome}: {note.check}[{note.case}]{more}: {note.reason}"


def _marked(cell: Cell, numbers: Mapping[Note, int]) -> str:
    return " ".join([cell.text, *(f"^{numbers[note]}" for note in cell.notes)])


def _provenance(number: int, env: Environment) -> list[str]:
    software = [env.driver or "none", env.cuda or "none", env.torch, env.triton, env.python, env.platform]
    return [str(number), env.device, *software, _commit(env), env.date]


def _commit(env: Environment) -> str:
    if env.commit.startswith("unknown"):
        return env.commit
    return env.commit[:12] + {True: " dirty", False: "", None: " (dirty or not: unknown)"}[env.dirty]


def _markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [[_escape(text) for text in header], ["---"] * len(header)]
    lines += [[_escape(text) for text in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _lines(text: str) -> list[str]:
    """The lines of a text from a report; control characters spelled out, so that none reaches a terminal."""
    return [
        "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
        for line in text.splitlines()
    ]


def _escape(text: str) -> str:
    return "<br>".join(_SPECIAL.sub(r"\\\g<0>", html.escape(line, quote=False)) for line in _lines(text))


def _code(text: str) -> str:
    """A code span: nothing inside is markup, whatever backticks it holds."""
    line = " ".join(_lines(text))
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    pad = " " if "`" in line else ""
    return f"{fence}{pad}{line}{pad}{fence}"
