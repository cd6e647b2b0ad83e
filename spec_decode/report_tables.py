"""The rows of a report as tables that store shared values once, and lists of indices as runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

Row = Mapping[str, Any]
_RUN = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?", re.ASCII)
_MOST = 100_000
"""Far above any real report; keeps a few malicious bytes from exhausting memory."""


class MalformedTable(ValueError):
    """A table that does not decode to rows; the message says why."""


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rows that have the same fields.

    fields: columns of `rows`; a nested field is named object.field. same: fields that are equal in all rows. values:
    for a field listed here, a cell is an index into its values. places: each row's index in the whole list, encoded by
    `runs`, if there are several tables.
    """

    fields: tuple[str, ...]
    same: dict[str, Any] = {}
    values: dict[str, tuple[Any, ...]] = {}
    places: str = ""
    rows: tuple[tuple[Any, ...], ...]


class Tables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A list of rows."""

    tables: tuple[Table, ...]


def packed(rows: Sequence[Row]) -> dict[str, Any]:
    """Encode rows as the JSON form of `Tables`. Raises ValueError for a field that is not an identifier, because it
    could not be told from a nested field."""
    alike: dict[tuple[str, ...], list[tuple[int, Row]]] = {}
    for place, row in enumerate(map(_flat, rows)):
        alike.setdefault(tuple(row), []).append((place, row))
    several = len(alike) > 1
    tables = [_table([row for _, row in found], [at for at, _ in found] if several else ()) for found in alike.values()]
    made: dict[str, Any] = msgspec.to_builtins(Tables(tuple(tables)))
    return made


def unpacked(tables: Any) -> list[dict[str, Any]]:
    """Decode the rows that `packed` encoded. Raises MalformedTable for anything else."""
    try:
        found = msgspec.convert(tables, Tables).tables
    except msgspec.ValidationError as error:
        raise MalformedTable(str(error)) from error
    placed: dict[int, dict[str, Any]] = {}
    for table in found:
        rows = list(_rows(table))
        places = indices(table.places) or range(len(placed), len(placed) + len(rows))
        if len(places) != len(rows):
            raise MalformedTable(f"a table has {len(rows)} rows and {len(places)} places")
        placed |= dict(zip(places, rows, strict=True))
    if placed.keys() != set(range(sum(len(table.rows) for table in found))):
        raise MalformedTable("the places of the rows are not 0, 1, 2 and so on")
    return [placed[place] for place in range(len(placed))]


def runs(found: Iterable[int]) -> str:
    """Encode indices (0 or more) in their order: "0-18,20" for 0, 1, ..., 18 and 20."""
    ends: list[list[int]] = []
    for index in found:
        if ends and ends[-1][1] + 1 == index:
            ends[-1][1] = index
        else:
            ends.append([index, index])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)


def indices(text: str) -> list[int]:
    """Decode what `runs` encoded. Raises MalformedTable for anything else."""
    found: list[int] = []
    for run in text.split(",") if text else ():
        if not (ends := _RUN.fullmatch(run)):
            raise MalformedTable(f"indices are written as 0-18,20, got {text[:40]!r}")
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if not first <= last < first + _MOST - len(found):
            raise MalformedTable(f"a run of indices must increase, with at most {_MOST} in all, got {run}")
        found += range(first, last + 1)
    return found


def _table(rows: list[Row], places: Sequence[int]) -> Table:
    same, values, columns = {}, {}, {}
    for name in rows[0]:
        column = [row[name] for row in rows]
        written = [msgspec.json.encode(cell) for cell in column]
        index = {each: i for i, each in enumerate(dict.fromkeys(written))}
        coded = [index[each] for each in written]
        if len(index) == 1:
            same[name] = column[0]
        elif _length(index) + _length(map(str, coded)) + len(name) < _length(written):
            values[name], columns[name] = tuple(map(msgspec.json.decode, index)), coded
        else:
            columns[name] = column
    cells = tuple(zip(*columns.values(), strict=True)) or ((),) * len(rows)
    return Table(fields=tuple(columns), same=same, values=values, places=runs(places), rows=cells)


def _length(written: Any) -> int:
    return sum(len(each) + 1 for each in written)


def _rows(table: Table) -> Iterator[dict[str, Any]]:
    for cells in table.rows:
        if len(cells) != len(table.fields):
            raise MalformedTable(f"a row has {len(cells)} cells, its table {len(table.fields)} fields")
        row = {name: _value(table, name, cell) for name, cell in zip(table.fields, cells, strict=True)}
        yield _nested({**table.same, **row})


def _value(table: Table, name: str, cell: Any) -> Any:
    if name not in table.values:
        return cell
    values = table.values[name]
    if type(cell) is not int or not 0 <= cell < len(values):
        raise MalformedTable(f"{name} has {len(values)} values, a row refers to number {cell!r}")
    return values[cell]


def _flat(row: Row) -> Row:
    if wrong := next((name for name in row if not name.isidentifier()), None):
        raise ValueError(f"a field of a row must be a name, got {wrong!r}")
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict) and value and all(key.isidentifier() for key in value):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            flat[name] = value
    return flat


def _nested(flat: Row) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, value in flat.items():
        outer, dot, inner = name.partition(".")
        if not dot:
            row[name] = value
        elif isinstance(fields := row.setdefault(outer, {}), dict):
            fields[inner] = value
        else:
            raise MalformedTable(f"{outer} is a value and has fields")
    return row
