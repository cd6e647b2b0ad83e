"""Tables for the README and the pages of docs/."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[str] = ()) -> str:
    """Make a table from cells that are Markdown. numbers: heads of right-aligned columns."""
    rule = ["---:" if name in numbers else "---" for name in head]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *rows])
