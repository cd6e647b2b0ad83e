"""The output projection of a draft whose checkpoint has none."""

from __future__ import annotations

import torch
from torch import nn

from attn_backends.kernels.linear.fp8_weight import Fp8Weight
from attn_backends.kernels.linear.linear import linear
from spec_decode.model_api import TargetModel
from spec_decode.models.shared_target import SharedTarget


class TargetHead(nn.Module):
    """The target's output projection. weight: an 8-bit copy that replaces it, or None."""

    weight: Fp8Weight | None

    def __init__(self, target: TargetModel) -> None:
        super().__init__()
        self._target = SharedTarget(target)
        self.weight = None

    @property
    def shared(self) -> torch.Tensor | None:
        """The target's `output_projection` [V, H], None if it has none."""
        return self._target.model.output_projection

    @property
    def is_quantised(self) -> bool:
        """Whether it reads the 8-bit weight of a target, so that it needs no copy."""
        return self.weight is None and self._target.has_fp8_head

    def product(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [T, V] for hidden [T, H]."""
        return self._target.model.logits(hidden) if self.weight is None else linear(hidden, self.weight)
