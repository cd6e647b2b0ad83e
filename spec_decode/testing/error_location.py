"""Locate where an exception was raised in its author's code."""

from __future__ import annotations

from pathlib import Path
from sysconfig import get_path
from traceback import extract_tb
from types import TracebackType

import torch

_LIBRARIES = (str(Path(torch.__file__).parent), get_path("stdlib"), "<")
_THIS_PACKAGE = str(Path(__file__).parents[1] / "_").removesuffix("_")


def outside_this_package(traceback: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames of this package; the whole traceback if there are no others."""
    kept, frames = None, []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    for each in reversed(frames):
        if not each.tb_frame.f_code.co_filename.startswith(_THIS_PACKAGE):
            kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept or (frames[0] if frames else None)


def error_location(error: BaseException) -> str:
    """Locate the innermost line outside torch and Python, and outside this package if there is one.

    Returns text to append to a message: " (in function, file:line)", or an empty string.
    """
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith(_LIBRARIES)]
    frames = [frame for frame in frames if not frame.filename.startswith(_THIS_PACKAGE)] or frames
    return f" (in {frames[-1].name}, {Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
