"""The matrix as one HTML file that works without network or scripts; scripts only add filters and a choice of theme."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import median_high
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from spec_decode.matrix.cells import OLDER, Status
from spec_decode.matrix.columns import grouped
from spec_decode.matrix.model import Matrix
from spec_decode.matrix.speed import Bar, Panel
from spec_decode.matrix.text import age_text, counted, plain
from spec_decode.tools.timing_limit import verdict

_HOW_TO_READ = (
    "What each backend claims, and what its checks showed. A count such as 72/72 is checks passed of checks run, "
    "without rejections; 0.4x means that the worst error was 0.4 of its budget, which is twice the error of a "
    "low-precision reference. Runs are never averaged: 67/67 + 1/1 are the checks of two runs. The newest result of "
    f"each check counts, and earlier ones that disagree follow. {OLDER} marks evidence from older source: it is dated, "
    "not withdrawn."
)
WIDTH = 300.0
ROW = 34.0
"""Height of a bar with its label above it."""
_LABEL = 38
"""Characters of a label that fit next to the value; the numbers below the panels show the full label."""
_OUTLIER = 4.0
"""A bar longer than this many medians of its panel exceeds the scale, or the others would be indistinguishable."""


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """One bar: from 0 to its median, the range as a line over its end, and the positions of floor and limit.

    A value that is missing, or beyond the scale, is None. beyond: whether the median is.
    """

    bar: Bar
    y: float
    label: str
    value: str
    beyond: bool
    width: float | None
    low: float | None
    high: float | None
    floor: float | None
    limit: float | None


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """A drawn panel. description: the same as text."""

    title: str
    height: float
    marks: tuple[Mark, ...]
    description: str


def plot(panel: Panel, quantity: str) -> Plot:
    """Draw the panel on its own scale, from 0 to its slowest bar that is not an outlier."""
    scale = WIDTH / (_longest(panel) or 1.0)
    return Plot(
        title=panel.title,
        height=ROW * len(panel.bars),
        marks=tuple(_mark(bar, ROW * n, scale) for n, bar in enumerate(panel.bars)),
        description=f"{panel.title}, {quantity}: {'; '.join(map(_description, panel.bars))}",
    )


def _longest(panel: Panel) -> float:
    """Return the end of the scale in microseconds."""
    timed = [(bar.us, bar.floor or 0.0) for bar in panel.bars if bar.us is not None]
    most = _OUTLIER * median_high(us.p50 for us, _ in timed) if timed else 0.0
    return max((max(us.p80, floor) for us, floor in timed if us.p50 <= most), default=0.0)


def _mark(bar: Bar, y: float, scale: float) -> Mark:
    us, label = bar.us, bar.label + (" (peer)" if bar.peer else "") + (OLDER if bar.changed else "")
    beyond = us is not None and _at(us.p50, scale) is None
    return Mark(
        bar=bar,
        y=y,
        label=label if len(label) <= _LABEL else f"{label[: _LABEL - 1]}…",
        value="no launch" if us is None else _short(us.p50),
        beyond=beyond,
        width=WIDTH if beyond else _at(us.p50 if us else None, scale),
        low=_at(us.p20 if us else None, scale),
        high=_at(us.p80 if us else None, scale),
        floor=_at(bar.floor, scale),
        limit=_at(bar.limit, scale),
    )


def _at(value: float | None, scale: float) -> float | None:
    if value is None or value * scale > WIDTH + 0.05:
        return None
    return round(value * scale, 1)


def _short(us: float) -> str:
    return f"{us:,.0f}" if us >= 100 else f"{us:.1f}" if us >= 10 else f"{us:.2f}"


def _description(bar: Bar) -> str:
    floor = f", floor {bar.floor:.4g}" if bar.floor is not None else ""
    return f"{bar.label}{' (peer)' if bar.peer else ''} {_time_text(bar)}{floor} {_verdict_text(bar)}".strip()


def _time_text(bar: Bar) -> str:
    """Format the median and range."""
    if bar.us is None:
        return "no launch"
    return f"{bar.us.p50:.4g} [{bar.us.p20:.4g} to {bar.us.p80:.4g}]"


def _verdict_text(bar: Bar) -> str:
    """Format the limits, and whether they are met."""
    limits, met = verdict(bar.limits)
    return limits and f"{limits}: {'met' if met else 'not judged' if met is None else 'missed'}"


_FOLDER = Path(__file__).parent / "templates"


def to_html(matrix: Matrix) -> str:
    """Render the page. Everything from a report is escaped as text."""
    script = (_FOLDER / "page.js").read_text(encoding="utf-8")
    page: str = template("page.html").render(
        matrix=matrix,
        columns=matrix.columns,
        groups=grouped(matrix.columns),
        starts={columns[0].tag for _, columns in grouped(matrix.columns)},
        devices=[(device, list(rows)) for device, rows in groupby(matrix.rows, key=lambda row: row.device)],
        backends=sorted({row.backend for row in matrix.rows}),
        statuses=list(Status),
        how_to_read=_HOW_TO_READ,
        opened=set({section.title: i for i, section in reversed(list(enumerate(matrix.speed)))}.values()),
        plot=plot,
        width=WIDTH,
        counted=counted,
        age_text=age_text,
        time_text=_time_text,
        verdict_text=_verdict_text,
        style=style(),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    return page


def style() -> Markup:
    """Return the style sheet of every page."""
    return Markup((_FOLDER / "page.css").read_text(encoding="utf-8"))


@cache
def template(name: str) -> jinja2.Template:
    """Return a template of this folder, which escapes everything that is put into it."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=_visible,
    )
    return environment.get_template(name)


def _visible(value: Any) -> Any:
    """Spell out control characters in foreign text; the page's own markup is unchanged."""
    return plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value
