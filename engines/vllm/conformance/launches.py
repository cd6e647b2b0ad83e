"""Launches of Triton's interpreter as one operation each, so that the emulator of CUDA graphs can record them.

A launch in the interpreter reads its tensors on the host, which no graph may do; on a device it is one kernel.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

_calls: list[Any] = []
_run = GridExecutor.__call__
torch.library.define("attn_backends_engines::launch", "(Tensor(a!)[] touched, int call) -> ()")
torch.library.impl("attn_backends_engines::launch", "cpu", lambda touched, call: _calls[call]())


def record_launches() -> None:
    """From now on, in this process, a launch under a dispatch mode is an operation that it sees."""
    GridExecutor.__call__ = _launch


def _launch(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
    if _get_current_dispatch_mode() is None:
        _run(self, *args, **kwargs)
        return
    _calls.append(partial(_run, self, *args, **kwargs))
    touched = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    torch.ops.attn_backends_engines.launch.default(touched, len(_calls) - 1)
