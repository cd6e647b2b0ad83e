"""Token embeddings."""

from __future__ import annotations

from torch import nn


class Embedding(nn.Embedding):
    """torch's, which draws no weights while it has no memory: on the meta device that imports torch's compiler, and a
    checkpoint replaces them."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()
