"""What a draft uses of its target, which keeps its own parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from attn_backends.kernels.linear.fp8_weight import Fp8Weight
from spec_decode.model_api import TargetModel


@dataclass(frozen=True, slots=True)
class SharedTarget:
    """Holds the target of a draft. It is no module, so the target's parameters do not become the draft's."""

    model: TargetModel

    @property
    def embedding(self) -> torch.Tensor:
        """The target's token embedding [V, H]."""
        return cast(nn.Embedding, self.model.embed).weight

    @property
    def has_fp8_head(self) -> bool:
        """Whether the target's own logits are a product with an 8-bit weight."""
        return isinstance(getattr(getattr(self.model, "lm_head", None), "weight", None), Fp8Weight)
