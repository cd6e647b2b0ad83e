"""A checkpoint's files as they are before anything is believed of them. Everything amiss is a CheckpointError."""

from __future__ import annotations

import errno
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message says what is wrong with which file."""


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in a file; raises CheckpointError, which ends in the remedy for a file that cannot be read."""
    try:
        require_regular(path)
        value = json.loads(path.read_bytes(), object_pairs_hook=_distinct)
    except OSError as error:
        raise CheckpointError(f"a checkpoint needs {path}, which cannot be read: {error.strerror}. {remedy}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} must hold JSON: {error}. Restore the file.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}. Restore the file.")
    return value


def require_plain_utf8(path: Path) -> None:
    """Raise CheckpointError for JSON that begins with a byte order mark, or is utf-16: `transformers` takes neither."""
    with path.open("rb") as file:
        if (encoding := json.detect_encoding(file.read(4))) != "utf-8":
            raise CheckpointError(f"{path} must be utf-8 without a byte order mark, it is {encoding}. Save it so.")


def check_safetensors(path: Path) -> None:
    """Raise CheckpointError for a file that is none of safetensors, and for a header that says a name twice, of which
    the library would take one."""
    try:
        require_regular(path)
        with safe_open(path, framework="pt"), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            json.loads(file.read(length), object_pairs_hook=_distinct)
    except (OSError, SafetensorError, ValueError) as error:
        raise unreadable(path, error) from error


def require_regular(path: Path) -> None:
    """Raise OSError for a pipe or a device, whose end would be waited for."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """What to raise for weights that cannot be read."""
    kind = "a PyTorch state" if path.suffix == ".bin" else "safetensors"
    return CheckpointError(
        f"{path} cannot be read as {kind}: {error}; it is missing, truncated or corrupt. Restore the file."
    )


def shortened(names: Sequence[str]) -> str:
    """The first names, for a message."""
    return f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite. Integers are, and so are floats of 8 bits, which scales belong to."""
    return not tensor.is_floating_point() or tensor.itemsize < 2 or bool(tensor.isfinite().all())


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        raise ValueError(f"{', '.join(sorted(twice))} is said twice in one object")
    if lost := [key for key, value in pairs if value != value]:
        # Python reads it, and what reads the field next would be blamed. Infinity is a limit in some configs.
        raise ValueError(f"{', '.join(lost)} is NaN, which is no number")
    return found
