"""What a draft uses of its target, which keeps its own parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from spec_decode.model_api import TargetModel


@dataclass(frozen=True, slots=True)
class SharedTarget:
    """Holds the target of a draft. It is no module, so the target's parameters do not become the draft's."""

    model: TargetModel

    @property
    def embedding(self) -> torch.Tensor:
        """The target's token embedding [V, H]."""
        return cast(nn.Embedding, self.model.embed).weight
