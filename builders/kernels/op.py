"""Defining an op: one record of its arguments, a torch implementation for the CPU, and a Triton launch for CUDA."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, get_type_hints

import torch

from builders.kernels.triton_runtime import interpreting

R = TypeVar("R", covariant=True)


class OpArguments(Protocol[R]):
    """The record that `define_op` takes: a NamedTuple whose fields are the op's arguments, in order, with their types.

    A field is a Tensor, int, float or bool, one of these or None, or a Sequence of Tensor or int.
    """

    def reference(self) -> R:
        """Compute the op in plain torch: it runs on the CPU and defines the result. Its return annotation is the
        op's."""

    def launch(self) -> R:
        """Launch the op's kernels on CUDA tensors, or on CPU tensors in Triton's interpreter."""


def define_op(name: str, arguments: type[OpArguments[R]], *, mutates: Sequence[str] = ()) -> Callable[..., R]:
    """Define torch.ops.<namespace>.<op> from "namespace::op" and its `OpArguments`, and return its callable.

    The schema is inferred from the record's fields. mutates: the fields that the op writes to. If the op returns
    tensors, its record needs a method `fake`, which returns empty ones of the same shapes and dtypes. Calls are
    positional: with many arguments, build the record by keyword and call op(*record). Raises ValueError for an
    unsupported field type, or a mutated field that does not exist.

    The dispatcher sees every kernel this way: the emulator records it, opcheck tests it. torch.library.custom_op would
    do the same at six times the host time per call (14 against 2.4 us, measured), for an unused autograd wrapper.
    """
    # Wraps the dispatcher's tuple directly: the record's own constructor would cost another 0.3 us per call.
    new: Any = tuple.__new__
    reference, launch = arguments.reference, arguments.launch
    fake = getattr(arguments, "fake", None)
    types = get_type_hints(arguments)
    first_tensor = list(types.values()).index(torch.Tensor)

    def on_cpu(*args: Any) -> Any:
        return (launch if interpreting() else reference)(new(arguments, args))

    def on_cuda(*args: Any) -> Any:
        # Triton launches on the current device, even if the tensors are on another.
        if (device := args[first_tensor].get_device()) != torch.cuda.current_device():
            with torch.cuda.device(device):
                return launch(new(arguments, args))
        return launch(new(arguments, args))

    def on_fake(*args: Any) -> Any:
        return fake(new(arguments, args)) if fake else None

    torch.library.define(name, _schema(types, arguments, mutates))
    torch.library.impl(name, "cpu", on_cpu)
    torch.library.impl(name, "cuda", on_cuda)
    torch.library.register_fake(name, on_fake)
    namespace, op = name.split("::")
    # Skips the overload's __call__, one more Python frame: 0.3 us of 2.4.
    call: Callable[..., R] = getattr(getattr(torch.ops, namespace), op).default._op
    return call


def _schema(types: dict[str, Any], arguments: type[Any], mutates: Sequence[str]) -> str:
    """Infer "(Tensor x, Tensor(a!) out, ...) -> ..." from the types of the record's fields and its reference."""
    parameters = [
        inspect.Parameter(field, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=types[field]) for field in types
    ]

    def prototype() -> None: ...

    returns = get_type_hints(arguments.reference).get("return")
    prototype.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        parameters, return_annotation=None if returns is type(None) else returns
    )
    return str(torch.library.infer_schema(prototype, mutates_args=tuple(mutates)))
