"""Corrections for where Triton's interpreter differs from a compiled kernel.

Before 3.9, the minimum of a NaN and a number is NaN; compiled, it is the number. Since 3.9, a mask with a scalar side,
`inside & (column < columns)`, is int32 and rejected, and the arg max of all-NaN values raises.

They also skip work that triton.language repeats for every value: it makes each value's shape and type anew, and for
each operation compares the operands' types name by name and size by size, even if they are the same object.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
from triton.runtime import interpreter

from spec_decode.testing.interpreter import interpret_kernels_on


def repair() -> None:
    """Apply for the rest of the process."""
    interpret_kernels_on(torch.device("cpu"))
    _remember_shapes()
    _see_that_one_object_is_itself()
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 9):
        _ignore_nan()
    else:
        _take_masks_and_nan()


def _remember_shapes() -> None:
    core = interpreter.tl.core

    @cache
    def shape_and_numel(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_and_numel(tuple(type.shape) if type.is_block() else ())

    make_type, known = core.block_type.__init__, dict[Any, tuple[Any, ...]]()

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in known:
            make_type(self, element_ty, shape)
            known[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = known[key]

    core.tensor.__init__, core.block_type.__init__ = init, init_type


def _see_that_one_object_is_itself() -> None:
    core, semantic = interpreter.tl.core, interpreter.TritonSemantic
    equal, broadcast, unwrap = core.dtype.__eq__, semantic.broadcast_impl_value, core._unwrap_if_constexpr
    nested = (list, tuple, core.tuple, core.constexpr)

    def is_equal(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    def broadcast_unlike(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    core.dtype.__eq__, semantic.broadcast_impl_value = is_equal, broadcast_unlike
    core._unwrap_if_constexpr = lambda value: unwrap(value) if isinstance(value, nested) else value


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
