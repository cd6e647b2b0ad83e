"""Triton's interpreter, which runs kernels for checks on machines without a GPU."""

from __future__ import annotations

import os
import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from spec_decode.testing.interpreter_speed import speed_up_interpreter

if TYPE_CHECKING:
    import torch


def interpret_kernels_on(device: torch.device) -> None:
    """On the CPU, have Triton interpret its kernels, so that checks run these and not their torch implementation.

    Triton reads the variable when a kernel is defined: call this before anything imports Triton.
    """
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        if find_spec("triton"):
            sum_products_in_order()
            compute_in_silence()
            speed_up_interpreter()


def sum_products_in_order() -> None:
    """Make the interpreter sum the terms of a product in order, for the rest of the process.

    It leaves a product to the machine's BLAS, and on some machines the bits of a row then depend on its position among
    the others. On a GPU they do not, and the contract's batch invariance is about that.
    """
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    dot = builder.create_dot
    if dot.__name__ == "dot_in_order":
        return

    def dot_in_order(self: Any, a: Any, b: Any, total: Any, *rest: Any) -> Any:
        for term in range(a.data.shape[-1]):
            column = handle(a.data[..., term : term + 1], a.dtype)
            total = dot(self, column, handle(b.data[..., term : term + 1, :], b.dtype), total, *rest)
        return total

    builder.create_dot = dot_in_order


def compute_in_silence() -> None:
    """Silence numpy's warnings for 1 / 0, log(0), NaN and infinity in the interpreter, for the rest of the process: a
    compiled kernel does not warn either, an empty row is meant to have the log of 0, and checks put NaN in caches."""
    import numpy as np
    from triton.runtime.interpreter import GridExecutor

    warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)
    if not hasattr(GridExecutor.__call__, "__wrapped__"):  # only once
        GridExecutor.__call__ = np.errstate(divide="ignore", invalid="ignore")(GridExecutor.__call__)
