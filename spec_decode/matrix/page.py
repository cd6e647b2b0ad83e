"""The matrix as one HTML file that needs no network and no scripts; scripts only add filters and a choice of theme."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from spec_decode.matrix.cells import Status
from spec_decode.matrix.model import Matrix
from spec_decode.matrix.numbered import HOW_TO_READ, age_text, grouped, time_text, verdict_text
from spec_decode.matrix.plots import WIDTH, plot
from spec_decode.matrix.speed import TITLES
from spec_decode.matrix.text import counted, plain

_FOLDER = Path(__file__).parent / "templates"


def to_html(matrix: Matrix) -> str:
    """The page. Whatever a report holds is shown as text: nothing of it is markup."""
    script = (_FOLDER / "page.js").read_text(encoding="utf-8")
    page: str = _template().render(
        matrix=matrix,
        columns=matrix.columns,
        groups=grouped(matrix.columns),
        starts={columns[0].tag for _, columns in grouped(matrix.columns)},
        devices=[(device, list(rows)) for device, rows in groupby(matrix.rows, key=lambda row: row.device)],
        backends=sorted({row.backend for row in matrix.rows}),
        statuses=list(Status),
        how_to_read=HOW_TO_READ,
        opened={next((i for i, s in enumerate(matrix.speed) if s.title == title), None) for title in TITLES.values()},
        plot=plot,
        width=WIDTH,
        counted=counted,
        age_text=age_text,
        time_text=time_text,
        verdict_text=verdict_text,
        style=Markup((_FOLDER / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    return page


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=_visible,
    )
    return environment.get_template("page.html")


def _visible(value: Any) -> Any:
    """Control characters in a stranger's text are spelled out; our own markup stays as it is."""
    return plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value
