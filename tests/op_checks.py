"""What every op is held to: its schema is true, and its fake returns what it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only


def check_op(op: Any, arguments: Sequence[Any]) -> None:
    """Raise AssertionError, or what opcheck raises, for an op that is not as it says."""
    torch.library.opcheck(op, tuple(arguments), test_utils=("test_schema", "test_faketensor"))
    # opcheck compares nothing with a fake that returns None.
    with FakeTensorMode() as mode:
        fake = op(*tree_map_only(torch.Tensor, mode.from_tensor, tuple(arguments)))
    assert _described(fake) == _described(op(*arguments))


def _described(result: Any) -> list[tuple[torch.Size, torch.dtype]]:
    tensors = () if result is None else (result,) if isinstance(result, torch.Tensor) else result
    return [(tensor.shape, tensor.dtype) for tensor in tensors]
