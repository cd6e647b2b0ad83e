"""Hooks around methods of vLLM's classes, which check results, or tell what happens to a recorder of each object."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from types import SimpleNamespace
from typing import Any, TypeAlias, TypeVar

from attn_backends.engines.vllm.compat import UnsupportedVllm, requirement

R = TypeVar("R")
Run: TypeAlias = Callable[[], Any]
"""Runs the method that a hook wraps."""
Read: TypeAlias = Callable[[], Any]
"""Returns the method's arguments as attributes: most rounds need none, and binding takes the most time here."""
Hooks: TypeAlias = Mapping[type[Any], Mapping[str, tuple[Callable[[Any, Run, Read], Any], str]]]
"""The hook of each method, and the arguments that it reads."""


def install(hooks: Hooks, of: str, recorder_of: Callable[[Any], Any]) -> None:
    """Wrap the methods, once. of: what the classes are. Raises UnsupportedVllm if one is not vLLM's own."""
    methods = [(cls, name, *hook) for cls, named in hooks.items() for name, hook in named.items()]
    if wrong := [f"{cls.__name__}.{name}" for cls, name, _, read in methods if not _takes(cls, name, read.split())]:
        raise UnsupportedVllm(
            f"ATTN_BACKENDS_VALIDATE=1 supports the {of} of a released vLLM, this one differs in: "
            f"{', '.join(wrong)}. Install {requirement()}, or unset the variable."
        )
    for cls, name, hook, _ in methods:
        wrap(cls, name, hook, recorder_of)


def kept_recorder(make: Callable[[Any], R], owner: Any) -> R:
    """Return an object's recorder, made on first use."""
    if "attn_backends_recorder" not in vars(owner):
        owner.attn_backends_recorder = make(owner)
    found: R = owner.attn_backends_recorder
    return found


def wrap(cls: type, name: str, hook: Callable[[Any, Run, Read], Any], recorder_of: Callable[[Any], Any]) -> None:
    """Make calls of the method go through the hook, with the object's recorder."""
    method = getattr(cls, name)
    if getattr(method, "_hook", None) is hook:
        return
    signature = inspect.signature(method)

    @wraps(method)
    def wrapped(self: Any, *args: Any, **named: Any) -> Any:
        def read() -> Any:
            bound = signature.bind(self, *args, **named)
            bound.apply_defaults()
            return SimpleNamespace(**{**bound.arguments, "self": self})

        return hook(recorder_of(self), lambda: method(self, *args, **named), read)

    wrapped._hook = hook  # type: ignore[attr-defined]
    setattr(cls, name, wrapped)


def _takes(cls: type, name: str, arguments: list[str]) -> bool:
    method = getattr(cls, name, None)
    return callable(method) and set(arguments) <= set(inspect.signature(method).parameters)
