"""The folder of Triton's compiled kernels, looked at before any is compiled: Triton itself fails in mid-run."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from spec_decode.cli.output import UserError

VARIABLE = "TRITON_CACHE_DIR"
_REMEDY = f"Remove it, or set {VARIABLE} to another folder."


def require_kernel_cache() -> None:
    """Raise UserError for a folder of Triton's cache that cannot be written, or that holds what is no kernel."""
    # Triton takes an empty one for none.
    folder = Path(os.environ.get(VARIABLE) or Path.home() / ".triton" / "cache")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(
            f"Triton keeps compiled kernels in {folder}, which must be a folder that can be written: {error.strerror}. "
            f"Set {VARIABLE} to another."
        ) from error
    for description in folder.glob("*/*.json"):
        try:
            whole = isinstance(json.loads(description.read_bytes()), dict)
        except (OSError, ValueError, RecursionError):
            whole = description.name.startswith("__grp__")  # which Triton makes again
        if not whole:
            raise UserError(f"{description} of Triton's cache is damaged. {_REMEDY}")
    for kernel in folder.glob("*/*.cubin"):
        with kernel.open("rb") as file:
            if file.read(4) != b"\x7fELF":
                raise UserError(f"{kernel} of Triton's cache is no compiled kernel. {_REMEDY}")
