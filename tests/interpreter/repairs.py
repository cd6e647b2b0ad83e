"""What Triton's interpreter does unlike a compiled kernel, put right.

Before 3.9 the minimum of a NaN and a number is NaN; compiled, it is the number. Since 3.9 a mask of which one side is a
scalar, `inside & (column < columns)`, is int32 and refused, and the arg max of numbers that are all NaN raises.

And what it does again and again: each call of a device function goes through all of triton.language to replace what the
launch has replaced already, each operation makes anew the table of NumPy's dtypes, and each value its shape and type;
each operation compares the types and the shapes of its operands name by name and size by size, also where they are one
object, and makes a block of its number; each sum of integers is computed once more in 64 bits, for an assertion that is
made in debug mode alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import triton
from triton.runtime import interpreter

from spec_decode.cli.interpreter import divide_in_silence, sum_products_in_order


def repair() -> None:
    """For the rest of the process."""
    sum_products_in_order()
    divide_in_silence()
    _patch_once_a_launch()
    _call_at_once()
    _remember_dtypes()
    _remember_shapes()
    _see_that_one_object_is_itself()
    _remember_numbers()
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 9):
        _ignore_nan()
    else:
        _take_masks_and_nan()


def _patch_once_a_launch() -> None:
    """A launch replaces them and at its end puts them back; before 3.6 they stay replaced."""
    patch, is_builtin = interpreter._patch_lang, interpreter.tl.core.is_builtin

    @cache
    def languages(function: Any) -> list[Any]:
        seen = {id(value) for value in function.__globals__.values()}
        return [language for language in (interpreter.tl, interpreter.tl.core) if id(language) in seen]

    def patch_once(function: Any) -> Any:
        return patch(function) if any(is_builtin(language.load) for language in languages(function)) else None

    interpreter._patch_lang = patch_once


def _call_at_once() -> None:
    """Without two wrappers: one takes the semantics out of the options, one looks whether they are there."""
    semantic = interpreter.TritonSemantic(interpreter.interpreter_builder)

    def patch(place: Any, name: str, member: Any, builder: Any, *scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*args, **options)

        (scope[0].set_attr if scope else setattr)(place, name, call)

    interpreter._patch_attr = patch


def _remember_dtypes() -> None:
    dtype_of, known = interpreter._get_np_dtype, dict[str, np.dtype]()

    def remembered(type_: Any) -> np.dtype:
        scalar = type_.scalar
        if scalar.name not in known:
            known[scalar.name] = dtype_of(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = remembered


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


def _remember_numbers() -> None:
    """The operands of an operation: those alike as they are, a number as the constant made of it for such a tensor."""
    semantic, tensor = interpreter.TritonSemantic, interpreter.tl.tensor
    check, known = semantic.binary_op_type_checking_impl, dict[Any, Any]()

    def operands(self: Any, lhs: Any, rhs: Any, *how: bool, **also: bool) -> tuple[Any, Any]:
        if type(lhs) is not tensor:
            return check(self, lhs, rhs, *how, **also)
        if type(rhs) is tensor:
            # A quotient, of four flags or of one by name, may be of another type than its operands.
            alike = lhs.dtype is rhs.dtype and lhs.shape is rhs.shape and len(how) < 3 and not also
            return (lhs, rhs) if alike and not lhs.dtype.is_ptr() else check(self, lhs, rhs, *how, **also)
        # As text, zeros of both signs differ, and a number of each type.
        key = repr(rhs), lhs.type.name, how, *also
        if key not in known:
            found, constant = check(self, lhs, rhs, *how, **also)
            if found is not lhs:
                return found, constant
            constant.handle.data.flags.writeable = False
            known[key] = constant
        return lhs, known[key]

    semantic.binary_op_type_checking_impl = operands


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
