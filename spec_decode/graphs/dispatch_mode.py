"""A base of modes that look at each torch operation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class PlainDispatchMode(TorchDispatchMode):
    """A dispatch mode that sees the same operations in torch's inference mode as outside of it. Only outside does torch
    replace a composite operation by its parts before it asks a mode.

    It does without torch's guard against its compiler, which imports the compiler at the first operation (a second) and
    wraps each operation. Nothing is compiled inside these modes.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _is_composite(func):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return self.dispatch(func, args, kwargs or {})

    @abstractmethod
    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what func, which is not composite, returns for these arguments."""


@cache
def _is_composite(func: Any) -> bool:
    """Whether torch runs it as other operations. One with a kernel of its own too is not: torch prefers the kernel."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    name = func.name()
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CPU")
