"""Cache work that Triton's interpreter repeats: kernels are checked in less than half the time.

What changes in triton.language, which the interpreter shares with the compiler, has the same values as before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any


@cache
def speed_up_interpreter() -> None:
    """Speed up the interpreter for the rest of the process."""
    from triton.runtime import interpreter

    _patch_once_a_launch()
    _remember_shapes()
    _see_that_one_object_is_itself()
    _call_directly()
    _remember_dtypes()
    # Otherwise each integer sum is computed again in 64 bits, for an assertion made only in debug mode.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def _patch_once_a_launch() -> None:
    """Otherwise each call of a device function walks triton.language to patch what the launch has patched already.

    A launch restores it at its end; before Triton 3.6 it stays patched.
    """
    from triton.runtime import interpreter

    patch, is_builtin = interpreter._patch_lang, interpreter.tl.core.is_builtin

    @cache
    def languages(function: Any) -> list[Any]:
        seen = {id(value) for value in function.__globals__.values()}
        return [language for language in (interpreter.tl, interpreter.tl.core) if id(language) in seen]

    def patch_once(function: Any) -> Any:
        return patch(function) if any(is_builtin(language.load) for language in languages(function)) else None

    interpreter._patch_lang = patch_once


def _remember_shapes() -> None:
    """Otherwise each value makes its shape anew, and each type its name."""
    from triton.language import core

    make, make_type = core.tensor.__init__, core.block_type.__init__
    shapes, types = dict[str, tuple[Any, Any]](), dict[Any, tuple[Any, ...]]()

    def init(self: Any, handle: Any, type: Any) -> None:
        if type.name not in shapes:
            make(self, handle, type)
            shapes[type.name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[type.name]

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = types[key]

    core.tensor.__init__, core.block_type.__init__ = init, init_type


def _see_that_one_object_is_itself() -> None:
    """Otherwise types are compared name by name even if they are the same object, and plain values are unwrapped."""
    from triton.language import core

    equal, unwrap = core.dtype.__eq__, core._unwrap_if_constexpr
    nested = (list, tuple, core.tuple, core.constexpr)

    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    core._unwrap_if_constexpr = lambda value: unwrap(value) if isinstance(value, nested) else value


def _call_directly() -> None:
    """Otherwise each built-in is called through two wrappers: one takes the semantics out of the options, the other
    checks that they are present."""
    from triton.runtime import interpreter

    semantic = interpreter.TritonSemantic(interpreter.interpreter_builder)
    semantic.broadcast_impl_value = _broadcasting(semantic)
    semantic.binary_op_type_checking_impl = _converting(semantic)

    def patch(place: Any, name: str, member: Any, builder: Any, *scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*args, **options)

        (scope[0].set_attr if scope else setattr)(place, name, call)

    interpreter._patch_attr = patch


def _converting(semantic: Any) -> Callable[..., Any]:
    """Cache how an operation's operands are brought to one type and shape: operands whose dtype stays are only
    broadcast, and a number is converted once per tensor type."""
    from triton.language import tensor

    convert, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    constants, keep_dtypes = dict[Any, Any](), dict[Any, bool]()

    def converted(lhs: Any, rhs: Any, *how: bool, **also: bool) -> Any:
        if not isinstance(lhs, tensor):
            return convert(lhs, rhs, *how, **also)
        flags = how, *also.items()
        if isinstance(rhs, tensor):
            types = lhs.type.name, rhs.type.name, flags
            if types not in keep_dtypes:
                found = convert(lhs, rhs, *how, **also)
                keep_dtypes[types] = [each.dtype.name for each in found] == [lhs.dtype.name, rhs.dtype.name]
                return found
            return broadcast(lhs, rhs) if keep_dtypes[types] else convert(lhs, rhs, *how, **also)
        # repr() distinguishes zeros by sign, and numbers by type.
        key = repr(rhs), lhs.type.name, flags
        if key not in constants:
            found, constant = convert(lhs, rhs, *how, **also)
            if found is not lhs:
                return found, constant
            constant.handle.data.flags.writeable = False
            constants[key] = constant
        return lhs, constants[key]

    return converted


def _broadcasting(semantic: Any) -> Callable[..., Any]:
    """Cache the types that broadcasting gives to two operands."""
    broadcast, builder, known = semantic.broadcast_impl_value, semantic.builder, dict[Any, Any]()

    def as_(value: Any, type_: Any) -> Any:
        if value.type.name == type_.name:
            return value
        if value.type.is_block():
            return semantic.tensor(builder.create_broadcast(value.handle, type_.shape), type_)
        return semantic.tensor(builder.create_splat(type_, value.handle), type_)

    def broadcasted(lhs: Any, rhs: Any) -> Any:
        key = lhs.type.name, rhs.type.name
        if key not in known:
            found = broadcast(lhs, rhs)
            known[key] = found[0].type, found[1].type
            return found
        left, right = known[key]
        return as_(lhs, left), as_(rhs, right)

    return broadcasted


def _remember_dtypes() -> None:
    """Otherwise each operation rebuilds the table of NumPy's dtypes."""
    from triton.runtime import interpreter

    dtype_of, known = interpreter._get_np_dtype, dict[str, Any]()

    def remembered(type_: Any) -> Any:
        scalar = type_.scalar
        if scalar.name not in known:
            known[scalar.name] = dtype_of(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = remembered
