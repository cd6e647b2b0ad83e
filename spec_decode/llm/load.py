"""Find a model by its folder or its name, and load it with its draft."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from spec_decode.llm.pair import Pair, load_byte_pair
from spec_decode.models import SHIPPED_PAIR, CheckpointError, draft_names

Name = str | os.PathLike[str]


def load(model: Name, draft: Name | None, *, dtype: torch.dtype, device: torch.device) -> Pair:
    """The model and its draft.

    model: a folder, `pydoc` for the pair that comes with the package, or the name of a model in this machine's Hugging
    Face cache; nothing is downloaded. draft: likewise; of a byte-level pair, the name of one of its drafts. Raises
    CheckpointError.
    """
    folder = find(model)
    if is_pair(folder):
        if draft is not None and os.fspath(draft) not in (own := draft_names(folder)) and Path(draft).is_dir():
            raise CheckpointError(
                f"{folder} is a target with its own drafts, and {draft} is a folder. Pass the draft's target too, or "
                f"one of the names {', '.join(own)}."
            )
        return load_byte_pair(folder, dtype, device, draft=None if draft is None else os.fspath(draft))
    from spec_decode.llm.published import load_published_pair

    return load_published_pair(folder, None if draft is None else find(draft, "draft"), dtype=dtype, device=device)


def find(name: Name, what: str = "model") -> Path:
    """The folder of a model, or of a draft. Raises CheckpointError with what was looked for."""
    if not isinstance(name, str | os.PathLike):
        raise CheckpointError(f"a {what} is named by a folder or a name, got {name!r}. Pass its path.")
    path = Path(name)
    if os.fspath(name) and path.is_dir():
        return path
    if name == SHIPPED_PAIR.name:
        return SHIPPED_PAIR
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(os.fspath(name), local_files_only=True))
    except Exception as error:  # the hub's library has an exception for each way in which a name can be wrong
        raise CheckpointError(
            f"{what} {os.fspath(name)!r} is no folder, not {SHIPPED_PAIR.name!r}, and not in this machine's Hugging "
            f"Face cache. Nothing is downloaded: pass the folder of the {what}."
        ) from error


def is_pair(folder: Path) -> bool:
    """Whether a folder holds a target together with its drafts, as the shipped pair does."""
    try:
        values = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False  # whoever loads it says what is wrong
    return isinstance(values, dict) and "target" in values
