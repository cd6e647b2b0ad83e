"""Plot lines over logarithmic axes as an SVG that follows the reader's light or dark scheme."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 740, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 512, 64, 316
"""The edges of the plot area, in SVG units; line labels are to its right."""
GAP = 18
"""Minimum distance between two labels."""
STYLE = """
    svg { --ink: #1b1f26; --soft: #5b6472; --grid: #dde2ea; --line: #7a8494; --strong: #1f5fc4; }
    @media (prefers-color-scheme: dark) {
      svg { --ink: #e4e7ec; --soft: #a3adbb; --grid: #2b3442; --line: #8b97a8; --strong: #7ba6ef; }
    }
    text { font: 12.5px system-ui, "DejaVu Sans", sans-serif; fill: var(--soft); }
    .title { font-weight: 600; fill: var(--ink); }
    .grid { stroke: var(--grid); }
    .line { fill: none; stroke: var(--line); stroke-width: 2; }
    .dot { fill: var(--line); }
    .strong { --line: var(--strong); stroke-width: 3; }
    text.strong { fill: var(--strong); font-weight: 600; }
"""


@dataclass(frozen=True, slots=True)
class Line:
    """points: y by x, all positive. strong: drawn thicker and in colour. dash: SVG's stroke-dasharray."""

    label: str
    points: Mapping[int, float]
    strong: bool = False
    dash: str = ""


def line_plot(lines: Sequence[Line], *, title: str, subtitle: str, x: str, x_name: Callable[[int], str] = str) -> str:
    """Draw the lines on log axes. Ticks: the x values of the first line, as x_name writes them; 1, 2 and 5 times powers
    of ten."""
    values = [value for line in lines for value in line.points.values()]
    low, high = min(values) / 1.15, max(values) * 1.15
    places = sorted(lines[0].points)

    def across(value: float) -> float:
        return _between(value, places[0], places[-1], LEFT + 16, RIGHT - 16)

    def up(value: float) -> float:
        return _between(value, low, high, BOTTOM, TOP)

    parts = [
        f'<text class="title" x="{LEFT}" y="18">{escape(title)}</text>',
        f'<text x="{LEFT}" y="38">{escape(subtitle)}</text>',
    ]
    for tick in _ticks(low, high):
        parts += [
            f'<path class="grid" d="M{LEFT} {up(tick):.1f}H{RIGHT}"/>',
            f'<text x="{LEFT - 8}" y="{up(tick) + 4:.1f}" text-anchor="end">{tick:,}</text>',
        ]
    for place in places:
        parts.append(f'<text x="{across(place):.1f}" y="{BOTTOM + 20}" text-anchor="middle">{x_name(place)}</text>')
    parts.append(f'<text x="{(LEFT + RIGHT) / 2:.1f}" y="{BOTTOM + 38}" text-anchor="middle">{escape(x)}</text>')
    labels = _spaced([up(line.points[places[-1]]) for line in lines])
    # Draw the strong line last, over the others.
    for line, label in sorted(zip(lines, labels, strict=True), key=lambda pair: pair[0].strong):
        kind = " strong" if line.strong else ""
        at = [(across(place), up(line.points[place])) for place in places]
        way = " ".join(f"{h:.1f},{v:.1f}" for h, v in at)
        dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
        parts.append(f'<polyline class="line{kind}" points="{way}"{dash}/>')
        parts += [f'<circle class="dot{kind}" cx="{h:.1f}" cy="{v:.1f}" r="3.5"/>' for h, v in at]
        parts.append(f'<text class="label{kind}" x="{RIGHT + 4}" y="{label + 4:.1f}">{escape(line.label)}</text>')
    description = f"{title}. " + "; ".join(
        f"{line.label}: " + ", ".join(f"{line.points[place]:,.0f} at {x_name(place)}" for place in places)
        for line in lines
    )
    body = "\n  ".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n'
        f"  <title>{escape(description)}</title>\n  <style>{STYLE}  </style>\n  {body}\n</svg>\n"
    )


def _between(value: float, low: float, high: float, start: float, end: float) -> float:
    """Map a value onto a logarithmic axis that runs from `start` (at `low`) to `end` (at `high`)."""
    return start + (end - start) * math.log(value / low) / math.log(high / low)


def _ticks(low: float, high: float) -> list[int]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    return [tick for power in powers for digit in (1, 2, 5) if low <= (tick := digit * 10**power) <= high]


def _spaced(heights: Sequence[float]) -> list[float]:
    """Move label heights so that any two are at least GAP apart; their order stays."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    moved = list(heights)
    for before, index in pairwise(order):
        moved[index] = max(moved[index], moved[before] + GAP)
    return moved
