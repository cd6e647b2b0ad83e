"""Count the floating-point operations of a call, by weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from spec_decode.graphs.dispatch_mode import PlainDispatchMode


class FlopCounter(PlainDispatchMode):
    """While active, adds up in `flops`, by weight name, the floating-point operations of products with these weights.

    Any operation on a weight, or a view of it, and another matrix is a product, whichever kernel runs it. A weight
    [..., N, K] multiplies the M rows of its result [..., M, N]; with a weight [E, N, K], M rows in E groups share it.
    Leave out embeddings and codebooks: operations read only a few of their rows.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.flops = dict.fromkeys(weights, 0)
        self._names = {weight.untyped_storage().data_ptr(): name for name, weight in weights.items()}

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        matrices = [x for x in args if isinstance(x, torch.Tensor) and x.dim() > 1]
        names = [self._names.get(x.untyped_storage().data_ptr()) for x in matrices]
        if None in names:
            for name, weight in zip(names, matrices, strict=True):
                if name is not None:
                    self.flops[name] += _flops(tree_leaves(out)[-1], weight)
        return out


def _flops(result: torch.Tensor, weight: torch.Tensor) -> int:
    groups = len(weight) if weight.dim() > result.dim() else 1
    return 2 * result.shape[-2] * weight.numel() // groups
