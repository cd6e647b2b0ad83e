"""An engine's kernels as one op each, so that the CUDA graph emulator can record them.

A launch in Triton's interpreter, and a stand-in for a compiled kernel, read their tensors on the host, which a graph
forbids; on a device each is one kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

_calls: list[Callable[[], None]] = []
_run = GridExecutor.__call__
torch.library.define("attn_backends_engines::launch", "(Tensor(a!)[] touched, int call) -> ()")
torch.library.impl("attn_backends_engines::launch", "cpu", lambda touched, call: _calls[call]())


def launch(kernel: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Run the kernel; under a dispatch mode, as an op that the mode sees. It writes into tensors of its arguments."""
    if _get_current_dispatch_mode() is None:
        kernel(*args, **kwargs)
        return
    _calls.append(partial(kernel, *args, **kwargs))
    touched = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    torch.ops.attn_backends_engines.launch.default(touched, len(_calls) - 1)


def record_launches() -> None:
    """Route interpreter launches through `launch` from now on in this process."""
    GridExecutor.__call__ = lambda *args, **kwargs: launch(_run, *args, **kwargs)


def launch_in_order() -> None:
    """Make calls for programmatic dependent launch no-ops: in the interpreter a kernel starts after the previous one
    has ended."""
    import triton.language.extra.cuda as cuda

    for name in ("gdc_wait", "gdc_launch_dependents"):
        setattr(cuda, name, lambda **_: None)


_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]  # as torch has it


class OnTheDevice(TorchFunctionMode):
    """Makes every tensor report that it is on the device, for functions that assert so before a launch."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return True if func == _IS_CUDA else func(*args, **(kwargs or {}))
