"""Validation of checkpoint files before their content is trusted. All errors are CheckpointErrors."""

from __future__ import annotations

import errno
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

_TERSE = 20
"""Messages up to this length, such as a KeyError's key, say nothing without the name of the error."""


class CheckpointError(ValueError):
    """Raised for a checkpoint that cannot be loaded; the message names the file and the problem."""


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """Read a file that holds a JSON object. Raises CheckpointError; remedy ends the message for an unreadable file."""
    try:
        require_regular(path)
        value = json.loads(path.read_bytes(), object_pairs_hook=_distinct)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. {remedy}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}. Restore the file.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}. Restore the file.")
    return value


def require_plain_utf8(path: Path) -> None:
    """Raise CheckpointError for JSON with a byte order mark or in utf-16, which `transformers` cannot read."""
    with path.open("rb") as file:
        if (encoding := json.detect_encoding(file.read(4))) != "utf-8":
            raise CheckpointError(f"{path} must be utf-8 without a byte order mark, got {encoding}. Convert it.")


def check_safetensors(path: Path) -> list[str]:
    """Return the names of a file's tensors, in the order of their bytes.

    Raises CheckpointError for a file that is not safetensors or has a duplicate name in its header, for which the
    library would silently pick one tensor.
    """
    try:
        require_regular(path)
        with safe_open(path, framework="pt"), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length), object_pairs_hook=_distinct)
    except (OSError, SafetensorError, ValueError) as error:
        raise unreadable(path, error) from error
    header.pop("__metadata__", None)
    return sorted(header, key=lambda name: header[name]["data_offsets"])


def require_regular(path: Path) -> None:
    """Raise OSError for a pipe or a device, on which a read would block."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """Return the error to raise for weights that cannot be read."""
    kind = "a PyTorch state" if path.suffix == ".bin" else "safetensors"
    return CheckpointError(
        f"{path} cannot be read as {kind}: {in_short(error)}; it is missing, truncated or corrupt. Restore the file."
    )


def in_short(error: BaseException) -> str:
    """Return a library's message, at most some lines of it; its class if the message alone says little."""
    message = " ".join(str(error).split())
    if len(message) <= _TERSE:
        return f"{type(error).__name__} {message}".strip()
    return shorten(message, 300, placeholder="").rstrip(".")


def shortened(names: Sequence[str]) -> str:
    """Join the first names for a message."""
    return f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite. Always true for integers and for 8-bit floats, which need their scales."""
    if not tensor.is_floating_point() or tensor.itemsize < 2 or tensor.numel() == 0:
        return True
    # One pass without a copy, and a NaN is the least as well as the largest.
    least, largest = tensor.aminmax()
    return bool(least.isfinite() & largest.isfinite())


def wider(dtype: torch.dtype) -> str:
    """Return what to do about numbers too large for a dtype. No dtype of models has a larger range than bfloat16."""
    return "Load it as bfloat16." if dtype == torch.float16 else "Restore the file."


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(values := dict(pairs)) < len(pairs):
        duplicates = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        raise ValueError(f"{', '.join(sorted(duplicates))} is duplicated in one object")
    if nan := [key for key, value in pairs if value != value]:
        # Python accepts NaN, so a later reader would get the blame. Infinity is a legitimate limit in some configs.
        raise ValueError(f"{', '.join(nan)} is NaN")
    return values
