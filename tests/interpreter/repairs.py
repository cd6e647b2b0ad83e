"""Corrections for where Triton's interpreter differs from a compiled kernel.

Before 3.9, the minimum of a NaN and a number is NaN; compiled, it is the number. Since 3.9, a mask with a scalar side,
`inside & (column < columns)`, is int32 and rejected, and the arg max of all-NaN values raises. Any version converts an
8-bit NaN to 480.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
from triton.runtime import interpreter

from spec_decode.testing.interpreter import interpret_kernels_on


def repair() -> None:
    """Apply for the rest of the process."""
    interpret_kernels_on(torch.device("cpu"))
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 9):
        _ignore_nan()
    else:
        _take_masks_and_nan()
    _convert_nan()


def _convert_nan() -> None:
    convert = interpreter._convert_float

    def converted(input: Any, input_dtype: Any, *rest: Any) -> Any:
        output = convert(input, input_dtype, *rest)
        if input_dtype == interpreter.tl.float8e4nv:
            # All bits set: NaN in every wider dtype.
            output[input.view(np.uint8) & 0x7F == 0x7F] = ~output.dtype.type(0)
        return output

    interpreter._convert_float = converted


def _ignore_nan() -> None:
    builder = interpreter.InterpreterBuilder
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)


def _take_masks_and_nan() -> None:
    builder, reduce = interpreter.InterpreterBuilder, interpreter.ReduceOps
    load, store, min_max = builder.create_masked_load, builder.create_masked_store, reduce.min_max

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        return load(self, pointers, _as_bool(mask), *rest)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return store(self, pointers, value, _as_bool(mask), *rest)

    def min_or_max(self: Any, input: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        return min_max(self, input, val_reduce_op, _ARG_OPS.get(idx_reduce_op, idx_reduce_op))

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
    reduce.min_max = min_or_max


def _as_bool(mask: Any) -> Any:
    return interpreter.TensorHandle(mask.data.astype(bool), interpreter.tl.int1)


def _skipping_nan(op: Callable[..., Any], instead: float) -> Callable[..., Any]:
    def arg(data: np.ndarray, **options: Any) -> Any:
        return op(np.nan_to_num(data, nan=instead, posinf=np.inf, neginf=-np.inf), **options)

    return arg


_ARG_OPS = {np.nanargmax: _skipping_nan(np.argmax, -np.inf), np.nanargmin: _skipping_nan(np.argmin, np.inf)}
