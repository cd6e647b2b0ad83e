"""Random numbers in the place of a checkpoint, for a model of any shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from spec_decode.models.checkpoints.store import TensorStore

SPREAD = 0.02
"""Standard deviation of a random weight: states neither vanish nor grow."""


class RandomStore(TensorStore):
    """A checkpoint that was never written: whatever is taken is drawn at random, on the device."""

    def __init__(self, config: dict[str, Any], names: list[str], device: torch.device) -> None:
        super().__init__(Path("random"), config, dict.fromkeys(names, Path("random")))
        self._device = device

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Norms are 1, maps of tokens the identity, all other numbers normal."""
        self._taken.add(name)
        if name == "d2t":
            return torch.zeros(shape, dtype=torch.int64)
        if name.endswith(("norm.weight", "layernorm.weight")):
            return torch.ones(shape, dtype=dtype, device=self._device)
        return torch.randn(shape, dtype=dtype, device=self._device).mul_(SPREAD)

    def take_flat(self, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Normal numbers."""
        return self.take(name, (size,), dtype)
