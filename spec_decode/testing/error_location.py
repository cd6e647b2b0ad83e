"""Where an exception was raised, as its author wants to hear it."""

from __future__ import annotations

from pathlib import Path
from sysconfig import get_path
from traceback import extract_tb

import torch

_NO_AUTHORS = (str(Path(torch.__file__).parent), get_path("stdlib"), "<")
_OURS = str(Path(__file__).parents[1] / "_").removesuffix("_")


def raised_in(error: BaseException) -> str:
    """The innermost line that is no part of torch or Python, nor, where there is another, of this package.

    In words to put behind a message: " (in function, file:line)", or nothing.
    """
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith(_NO_AUTHORS)]
    frames = [frame for frame in frames if not frame.filename.startswith(_OURS)] or frames
    return f" (in {frames[-1].name}, {Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
