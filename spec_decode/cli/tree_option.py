"""`--tree`: how many choices and draft tokens, or a file of paths."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from spec_decode.cli.output import UserError

if TYPE_CHECKING:
    from spec_decode.trees import DraftTree, DynamicTreeConfig

TREE_HELP = (
    "Draft trees, -k tokens deep: WIDTHxTOKENS such as 4x16, or a JSON file of paths such as [[0], [1], [0, 0]]."
)


def parse_tree(text: str) -> DraftTree | DynamicTreeConfig:
    """The tree that the user asks for. Raises UserError for a file that holds no paths, BatchError for no tree."""
    from spec_decode.trees import DraftTree, DynamicTreeConfig

    if sizes := re.fullmatch(r"(\d{1,9})x(\d{1,9})", text):
        return DynamicTreeConfig(width=int(sizes[1]), num_tokens=int(sizes[2]))
    try:
        paths = json.loads(Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"--tree must be WIDTHxTOKENS, like 4x16, or a JSON file of paths, got {text!r}: {error}. "
            "Write one of the two."
        ) from error
    if not isinstance(paths, list) or not all(isinstance(path, list) for path in paths):
        raise UserError(
            f"the file of --tree must hold a list of paths, each a list of choices, {text} does not. "
            "Write it like [[0], [1], [0, 0]]."
        )
    return DraftTree.from_paths(paths)
