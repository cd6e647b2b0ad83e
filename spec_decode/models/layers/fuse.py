"""What a draft makes of a token's embedding and the state before it: the inputs of its first layer.

Legend: T tokens, H hidden size. Floats are in the weights' dtype.
"""

from __future__ import annotations

import torch
from torch import nn

from spec_decode.models.kernels.embed_concat import embed_concat
from spec_decode.models.layers.linear import EmbedLinear, Linear, ResidualStream
from spec_decode.models.layers.rms_norm import RMSNorm


class Projection(EmbedLinear):
    """Of both, as in EAGLE: x = W (embedding | state). The first layer norms x, or reads it as it is."""

    def __init__(self, hidden: int, *, bias: bool = False, layer_norms: bool = True) -> None:
        super().__init__(2 * hidden, hidden, bias=bias)
        self.layer_norms = layer_norms

    def stream(self, token_ids: torch.Tensor, embedding: torch.Tensor, hidden: torch.Tensor) -> ResidualStream:
        """Return x [T, H], and None or x, for token_ids int64 [T], embedding [V, H] and hidden [T, H]."""
        x = self.forward(token_ids, embedding, hidden)
        return x, None if self.layer_norms else x


class NormedPair(nn.Module):
    """Of both, each with its own norm, as in EAGLE-3: the first layer's attention reads embedding | state, and the
    residual starts from the state."""

    def __init__(self, embedding_norm: RMSNorm, state_norm: RMSNorm, *, normed_residual: bool = False) -> None:
        """normed_residual: the residual starts from the normed state."""
        super().__init__()
        self.embedding_norm, self.state_norm = embedding_norm, state_norm
        self.normed_residual = normed_residual

    def pair(self, token_ids: torch.Tensor, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the concatenation of both, normed, [T, 2 H]."""
        norms = [self.embedding_norm.weight, self.state_norm.weight]
        return embed_concat(token_ids, embedding, hidden, norms, self.state_norm.eps)

    def stream(self, token_ids: torch.Tensor, embedding: torch.Tensor, hidden: torch.Tensor) -> ResidualStream:
        """Return x [T, H] and what attention reads, [T, 2 H], for token_ids int64 [T], embedding [V, H] and hidden
        [T, H]."""
        both = self.pair(token_ids, embedding, hidden)
        return both.chunk(2, -1)[1].contiguous() if self.normed_residual else hidden, both


class NormedProjection(NormedPair):
    """Of both, each with its own norm, as in multi-token prediction: x = W (embedding | state)."""

    def __init__(self, embedding_norm: RMSNorm, state_norm: RMSNorm, project: Linear) -> None:
        super().__init__(embedding_norm, state_norm)
        self.project = project

    def stream(self, token_ids: torch.Tensor, embedding: torch.Tensor, hidden: torch.Tensor) -> ResidualStream:
        """Return x [T, H] and None, for token_ids int64 [T], embedding [V, H] and hidden [T, H]."""
        return self.project.product(self.pair(token_ids, embedding, hidden)), None
