"""A decoder layer whose attention and feed-forward each run between two convolutions over the tokens of a block.

Legend: T tokens, H hidden size, C taps, G groups of channels. Floats are in the weights' dtype.
"""

from __future__ import annotations

import torch
from torch import nn

from attn_backends.kernels.rope import Rope
from spec_decode.models.attention import Attention
from spec_decode.models.config import ModelConfig
from spec_decode.models.kernels.block_convolution import block_convolution
from spec_decode.models.kernels.linear import gated_linear
from spec_decode.models.layers.decoder_layer import AttentionLayer, LayerOptions
from spec_decode.models.layers.linear import Linear, ResidualStream


class ConvolutionPair(nn.Module):
    """The convolutions before and after a sublayer. What comes into the sublayer changes the taps of both."""

    def __init__(self, hidden_size: int, num_taps: int, group_size: int) -> None:
        """group_size: channels that share a change of their taps; it divides hidden_size."""
        super().__init__()
        self.num_groups = hidden_size // group_size
        self.base_kernel = nn.Parameter(torch.empty(2, num_taps, hidden_size))
        self.kernel_projection = Linear(hidden_size, 2 * num_taps * self.num_groups)

    def before(self, inputs: torch.Tensor, block_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """inputs [T, H] of blocks of block_len tokens; what the sublayer takes of them [T, H], and `after`'s change of
        taps [T, C, G]."""
        changes = self.kernel_projection(inputs).view(len(inputs), 2, -1, self.num_groups)
        return block_convolution(inputs, self.base_kernel[0], changes[:, 0], block_len), changes[:, 1]

    def after(self, outputs: torch.Tensor, change: torch.Tensor, block_len: int) -> torch.Tensor:
        """The sublayer's outputs [T, H], with the change that `before` returned; [T, H]."""
        return block_convolution(outputs, self.base_kernel[1], change, block_len)


class ConvolvedLayer(AttentionLayer):
    """Attention and SwiGLU feed-forward, each with a pre-norm, a pair of convolutions and a residual."""

    def __init__(
        self, config: ModelConfig, layer: int, options: LayerOptions, *, num_taps: int, group_size: int
    ) -> None:
        """num_taps, group_size: of all convolutions."""
        super().__init__(config, layer, options, qkv_inputs=config.hidden_size)
        self.attention_conv = ConvolutionPair(config.hidden_size, num_taps, group_size)
        self.mlp_conv = ConvolutionPair(config.hidden_size, num_taps, group_size)

    def forward(
        self, x: torch.Tensor, delta: torch.Tensor | None, rope: Rope, attention: Attention, block_len: int
    ) -> ResidualStream:
        """x and the delta yet to be added to it, both [T, H], of blocks of block_len tokens; the same pair after the
        layer."""
        x, normed = self.attn_norm(x, delta)
        inputs, change = self.attention_conv.before(normed, block_len)
        attended = self.attend(self.qkv.product(inputs), rope, attention)
        delta = self.attention_conv.after(self.out.product(attended), change, block_len)
        x, normed = self.mlp_norm(x, delta)
        inputs, change = self.mlp_conv.before(normed, block_len)
        inner = gated_linear(inputs, self.gate_up.weight)
        return x, self.mlp_conv.after(self.down.product(inner), change, block_len)
