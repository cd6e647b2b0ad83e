"""An engine's kernels as one op each, so that the CUDA graph emulator can record them.

A launch in Triton's interpreter, and a stand-in for a compiled kernel, read their tensors on the host, which a graph
forbids; on a device each is one kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
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
