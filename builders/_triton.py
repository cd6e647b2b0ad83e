"""Triton where it is installed; its decorators do nothing where it is not, so that CPU-only platforms import."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

try:
    import triton
    import triton.language as tl

    HAVE_TRITON = True
except ImportError:  # platforms without Triton wheels run the torch implementation of every op
    HAVE_TRITON = False

    class _Absent:
        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return args[0] if args and callable(args[0]) else self

    triton = _Absent()
    tl = _Absent()


TRITON_VERSION: str = getattr(triton, "__version__", "absent") if HAVE_TRITON else "absent"


def lacks_triton(device_type: str) -> list[str]:
    """Why our kernels cannot run on such a device; empty when they can."""
    if device_type == "cuda" and not HAVE_TRITON:
        return ["needs the package triton, which is not installed: pip install triton"]
    return []


# Triton's decorators read the variable once, when a kernel is defined.
_INTERPRETER = HAVE_TRITON and os.environ.get("TRITON_INTERPRET", "0") == "1"
_torch_only = False


def interpreting() -> bool:
    """Whether ops on CPU tensors run their Triton kernel in Triton's interpreter, not their torch implementation."""
    return _INTERPRETER and not _torch_only


@contextmanager
def torch_implementations() -> Iterator[None]:
    """Run the torch implementation of every op on CPU tensors, also where the interpreter is on (it is slow)."""
    global _torch_only
    before, _torch_only = _torch_only, True
    try:
        yield
    finally:
        _torch_only = before


__all__ = [
    "HAVE_TRITON",
    "TRITON_VERSION",
    "interpreting",
    "lacks_triton",
    "tl",
    "torch_implementations",
    "triton",
]
