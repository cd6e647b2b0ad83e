"""This project's docstrings as Markdown: field tables become tables, parameters and subscripts become code.

A docstring here is prose. What it says of a field or parameter is one of

    name   meaning              a line of its own, in columns parted by two spaces or more; longer ones are indented
    name: meaning               within a paragraph, also of several: "a, b and c: meaning"

and x[i] is code anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from griffe import Class, Extension, Function, Object

_ROW = re.compile(r"^[a-z]\w*(?:, [a-z]\w*)* {2,}\S")
_CONTINUED = re.compile(r"^ {4,}\S")
_COLUMNS = re.compile(r" {2,}")
_CODE = re.compile(r"(`+[^`]*`+)")
_SUBSCRIPT = re.compile(r"[\w.]+(?:\[(?:[^][]|\[[^][]*\])*\])+")
"""A name with subscripts, of one more inside at most: in Markdown, the like of x[i][j] is a link."""


class ProseDocstrings(Extension):
    """Rewrites each docstring as it is loaded."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value, _names(obj))


def to_markdown(text: str, names: Sequence[str]) -> str:
    """The docstring with its field tables as tables, and subscripts and each of `names` before a colon as code."""
    lines, out = text.splitlines(), list[str]()
    while lines:
        rows = _take_rows(lines)
        out += ["", *_table(rows), ""] if rows else [_mark(lines.pop(0), names)]
    return "\n".join(out).strip("\n")


def _take_rows(lines: list[str]) -> list[list[str]]:
    """The columns of the table that the lines begin with, which are taken from them."""
    rows: list[list[str]] = []
    while lines and (_ROW.match(lines[0]) or (rows and _CONTINUED.match(lines[0]))):
        line = lines.pop(0)
        if _ROW.match(line):
            rows.append(_COLUMNS.split(line))
        else:
            rows[-1][-1] += " " + line.strip()
    return rows


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    width = max(map(len, rows))
    head = ["field", "type", "meaning"] if width == 3 else ["field", *["meaning"] * (width - 1)]
    body = [[f"`{row[0]}`", *row[1:], *[""] * (width - len(row))] for row in rows]
    if width == 3:
        body = [[name, kind.replace(" ", "\N{NO-BREAK SPACE}"), meaning] for name, kind, meaning in body]
    ruled = [head, ["---"] * width, *body]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in ruled]


def _mark(line: str, names: Sequence[str]) -> str:
    """A line with what is code in it as code; drawings, and what is code already, stay as they are."""
    if line.startswith("    "):
        return line
    parts = _CODE.split(line)
    parts[::2] = [_SUBSCRIPT.sub(r"`\g<0>`", _mark_names(part, names)) for part in parts[::2]]
    return "".join(parts)


def _mark_names(text: str, names: Sequence[str]) -> str:
    if not names:
        return text
    name = "|".join(map(re.escape, names))
    listed = re.compile(rf"(?<![\w.])(?:(?:{name}), )*(?:(?:{name}) and )?(?:{name}):(?= |$)")
    return listed.sub(lambda found: re.sub(rf"\b(?:{name})\b", r"`\g<0>`", found[0]), text)


def _names(obj: Object) -> list[str]:
    if isinstance(obj, Function):
        return [parameter.name.lstrip("*") for parameter in obj.parameters if parameter.name != "self"]
    if isinstance(obj, Class):
        return [name for name, member in obj.members.items() if not name.startswith("_") and member.is_attribute]
    return []
