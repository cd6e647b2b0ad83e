"""Triton if it is installed; otherwise stubs whose decorators do nothing, so that CPU-only platforms can import."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from builders.chips import warn_unless_run
from builders.errors import require

__all__ = ["tl", "triton"]  # re-exported; every other name is defined here

try:
    import triton
    import triton.language as tl

    HAVE_TRITON = True
except ImportError:  # platforms without Triton wheels run the torch implementation of every op
    HAVE_TRITON = False

    class _Absent:
        # Takes every name and argument, so a misspelt one shows only where Triton is installed.
        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return args[0] if args and callable(args[0]) else self

    triton = _Absent()
    tl = _Absent()


TRITON_VERSION: str = getattr(triton, "__version__", "absent") if HAVE_TRITON else "absent"


def triton_unsupported_reasons(device_type: str) -> list[str]:
    """Return why this library's kernels cannot run on a device type; empty if they can."""
    if device_type == "cuda" and not HAVE_TRITON:
        return ["needs the package triton, which is not installed: pip install triton"]
    return []


# Triton's decorators read the variable once, when a kernel is defined.
_INTERPRETER = HAVE_TRITON and os.environ.get("TRITON_INTERPRET", "0") == "1"
_torch_only = False


def interpreting() -> bool:
    """Return whether ops on CPU tensors run their Triton kernel in Triton's interpreter, not their torch code."""
    return _INTERPRETER and not _torch_only


@contextmanager
def torch_implementations() -> Iterator[None]:
    """Run the torch implementation of every op on CPU tensors, even with the (slow) interpreter on."""
    global _torch_only
    before, _torch_only = _torch_only, True
    try:
        yield
    finally:
        _torch_only = before


def stored_as(out: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a kernel stores to: out itself, or on the CPU an fp32 copy, which torch then converts to
    out's dtype, because the interpreter truncates fp32 to bf16 and hardware rounds."""
    return out.float() if out.is_cpu else out


PDL_VARIABLE = "ATTN_BACKENDS_PDL"
"""Environment variable, read at the first launch on a device: 1 requires programmatic dependent launch, 0 forbids it,
unset uses it if available."""


@cache
def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Return the launch options of a kernel that waits for its predecessor itself, so it can start before that ends.

    Raises BatchError if the variable is not 0, 1 or unset, and for 1 if the device does not support it. Every launch
    asks, so the first one on a chip that no kernel has run on also logs a line.

    Programmatic dependent launch needs compute capability 9 and a Triton that supports it. The order of everything
    later on the stream rests on one invariant: a kernel launched with these options takes `PDL: tl.constexpr`, and
    calls await_previous(PDL) on every path before it reads or writes a value. The end of a kernel then implies the end
    of every kernel before it, from any library, and reads and writes need no other care.
    """
    setting = os.environ.get(PDL_VARIABLE, "")
    require(
        setting in ("", "0", "1"),
        f"{PDL_VARIABLE} must be 0 or 1, got {setting!r}. Set one of them, or unset it.",
    )
    if device.type == "cuda":
        warn_unless_run(device)
    if device.type != "cuda" or setting == "0":
        return {"PDL": False}
    found = torch.cuda.get_device_capability(device)
    supported = found >= (9, 0) and torch.version.hip is None and hasattr(tl.extra.cuda, "gdc_wait")
    require(
        supported or setting == "",
        f"{PDL_VARIABLE}=1 needs compute capability 9.0 and a Triton with dependent launch, got {found} and Triton "
        f"{TRITON_VERSION}. Unset it to launch kernels one after another.",
    )
    return {"PDL": True, "launch_pdl": True} if supported else {"PDL": False}


@triton.jit
def await_previous(PDL: tl.constexpr) -> None:
    """Let the next kernel launch, then wait until all earlier kernels on the stream have ended and their stores are
    visible.

    The next kernel waits there in turn. Releasing it after this one's main work would be too late: rounds of a small
    draft took 5 % longer on an H200.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
