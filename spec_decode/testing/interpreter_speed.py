"""Cache work that Triton's interpreter repeats: kernels are checked in a third of the time.

Only the interpreter changes, nothing that it shares with the compiler.
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


def _call_directly() -> None:
    """Otherwise each built-in is called through two wrappers: one takes the semantics out of the options, the other
    checks that they are present."""
    from triton.runtime import interpreter

    semantic = interpreter.TritonSemantic(interpreter.interpreter_builder)
    semantic.binary_op_type_checking_impl = _remembering(semantic.binary_op_type_checking_impl)

    def patch(place: Any, name: str, member: Any, builder: Any, *scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*args, **options)

        (scope[0].set_attr if scope else setattr)(place, name, call)

    interpreter._patch_attr = patch


def _remembering(convert: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """Cache `convert`, which brings an operation's operands to one type and shape: operands that already match are
    returned, and a number is converted once per tensor type."""
    from triton.language import tensor

    known = dict[Any, Any]()

    def converted(lhs: Any, rhs: Any, *how: bool, **also: bool) -> tuple[Any, Any]:
        if type(lhs) is not tensor:
            return convert(lhs, rhs, *how, **also)
        if type(rhs) is tensor:
            # A division, with four flags or a keyword flag, can have another type than its operands.
            alike = lhs.dtype is rhs.dtype and len(how) < 3 and not also and not lhs.dtype.is_ptr()
            alike = alike and (lhs.shape is rhs.shape or lhs.shape == rhs.shape)
            return (lhs, rhs) if alike else convert(lhs, rhs, *how, **also)
        # repr() distinguishes zeros by sign, and numbers by type.
        key = repr(rhs), lhs.type.name, how, *also
        if key not in known:
            found, constant = convert(lhs, rhs, *how, **also)
            if found is not lhs:
                return found, constant
            constant.handle.data.flags.writeable = False
            known[key] = constant
        return lhs, known[key]

    return converted


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
