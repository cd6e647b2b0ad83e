"""Tensors of a checkpoint under a common prefix: what a module that reads its own weights takes them from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from spec_decode.models.checkpoints.store import TensorStore


@dataclass(frozen=True, slots=True)
class ScopedWeights:
    """The tensors under a prefix, which completes every name, cast and moved as they are taken."""

    store: TensorStore
    prefix: str
    dtype: torch.dtype
    device: torch.device

    def under(self, prefix: str) -> ScopedWeights:
        """Those under a longer prefix."""
        return replace(self, prefix=self.prefix + prefix)

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of that name."""
        return self.prefix + name in self.store.names()

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor of that name and shape; dtype None is that of the model."""
        return self.store.take(self.prefix + name, shape, dtype or self.dtype).to(self.device)

    def parameter(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """`take`, as a parameter that is not trained."""
        return frozen(self.take(name, *shape, dtype=dtype))

    def stacked(self, names: Sequence[str], rows: Sequence[int], *columns: int) -> nn.Parameter:
        """Matrices [rows[i], columns] (or vectors [rows[i]]) below each other: one product in place of several."""
        parts = [self.take(name, count, *columns) for name, count in zip(names, rows, strict=True)]
        return frozen(parts[0] if len(parts) == 1 else torch.cat(parts))

    def refuse_unused(self) -> None:
        """Raise CheckpointError for tensors under the prefix that no module took; others belong to the target."""
        self.store.refuse_unused(under=self.prefix)


def frozen(tensor: torch.Tensor) -> nn.Parameter:
    """A parameter that is not trained."""
    return nn.Parameter(tensor, requires_grad=False)
