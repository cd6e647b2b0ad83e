"""DeepSeek-V4's sliding-window attention over one latent per token.

Legend: T tokens, H hidden size, h heads, D head dim, G groups of heads. The whole latent is key and value of every
head, and each head has a sink logit, as in LatentDecoderLayer. The output is rotated back by the query's position and
projected through a low rank per group. Floats are in the weights' dtype except the sinks, which are fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from attn_backends.kernels.head_rotary import inverse_rotary, prepare_query
from attn_backends.kernels.linear.fp8_weight import Weight
from attn_backends.kernels.linear.linear import linear, stacked_linear
from attn_backends.kernels.rope import Rope
from attn_backends.kernels.write_latent import KvANormRope
from builders import AttentionKind, AttentionSpec
from spec_decode.model_api import Attention, AttentionInputs, KeepRows
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.store import ScopedWeights, frozen
from spec_decode.models.layers.rms_norm import RMSNorm
from spec_decode.models.layers.rope import RopeConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowShape:
    """Sizes of the layer's attention."""

    hidden: int
    heads: int
    head_dim: int
    q_rank: int
    out_rank: int
    groups: int
    window: int
    rope: RopeConfig
    eps: float

    def spec(self, page_size: int, dtype: torch.dtype) -> AttentionSpec:
        """Return the attention spec for a cache with this page size and dtype."""
        return AttentionSpec(
            num_q_heads=self.heads,
            num_kv_heads=1,
            head_dim=self.head_dim,
            page_size=page_size,
            dtype=dtype,
            sliding_window=self.window,
            sinks=True,
            kind=AttentionKind.MLA,
        )


def read_window_shape(config: ConfigReader, hidden: int, eps: float) -> WindowShape:
    """Read the attention from config.json. Raises CheckpointError for an impossible one."""
    heads, groups = config.get("num_attention_heads", int), config.get("o_groups", int)
    dim, rotated = config.get("head_dim", int), config.get("qk_rope_head_dim", int)
    window = config.get("sliding_window", int)
    if window < 1 or groups < 1 or heads % groups or not 2 <= rotated <= dim or rotated % 2:
        raise CheckpointError(
            f"{config.place} must divide its heads into o_groups, rotate an even number of a head's dims and have a "
            f"positive sliding_window, got {heads} heads in {groups} groups, {rotated} of {dim} dims and a window of "
            f"{window}. Restore the file."
        )
    return WindowShape(
        hidden=hidden,
        heads=heads,
        head_dim=dim,
        q_rank=config.get("q_lora_rank", int),
        out_rank=config.get("o_lora_rank", int),
        groups=groups,
        window=window,
        # rope_scaling and compress_rope_theta only apply to the target's compressed layers.
        rope=RopeConfig(dims=rotated, theta=config.positive("rope_theta")),
        eps=eps,
    )


class WindowAttention(nn.Module):
    """The attention of one layer, loaded from tensors with DeepSeek-V4's names."""

    project_in: Weight
    q_up: Weight
    out_up: Weight

    def __init__(self, shape: WindowShape, weights: ScopedWeights) -> None:
        super().__init__()
        self.shape = shape
        names = ["wq_a.weight", "wkv.weight"]
        self.project_in = weights.stacked(names, [shape.q_rank, shape.head_dim], shape.hidden)
        self.q_norm = RMSNorm.read(weights, "q_norm.weight", shape.q_rank, shape.eps)
        self.q_up = weights.parameter("wq_b.weight", shape.heads * shape.head_dim, shape.q_rank)
        self.kv_norm = RMSNorm.read(weights, "kv_norm.weight", shape.head_dim, shape.eps)
        self.sinks = weights.parameter("attn_sink", shape.heads, dtype=torch.float32)
        group_inputs = shape.heads * shape.head_dim // shape.groups
        out_down = weights.take("wo_a.weight", shape.groups * shape.out_rank, group_inputs)
        self.out_down = frozen(out_down.unflatten(0, (shape.groups, -1)))
        self.out_up = weights.parameter("wo_b.weight", shape.hidden, shape.groups * shape.out_rank)

    def forward(
        self, x: torch.Tensor, rope: Rope, layer: int, attention: Attention, keep: KeepRows | None = None
    ) -> torch.Tensor:
        """Return the residual's delta [T, H], for the kept rows. x: [T, H], normed."""
        shape = self.shape
        query, latent = linear(x, self.project_in).split([shape.q_rank, shape.head_dim], -1)
        query = linear(self.q_norm(query)[1], self.q_up).unflatten(-1, (shape.heads, -1))
        query = prepare_query(query, rope.positions, rope.table, eps=shape.eps)
        norm = KvANormRope(weight=self.kv_norm.weight, eps=shape.eps, positions=rope.positions, table=rope.table)
        latent = latent[:, None]
        out = attention(AttentionInputs(layer, query, latent, latent, kv_a_norm_rope=norm, sinks=self.sinks))
        out = inverse_rotary(out, rope.positions, rope.table)
        out = out if keep is None else keep(out)
        narrow = stacked_linear(out.view(out.shape[0], shape.groups, -1), self.out_down)
        return linear(narrow.flatten(1), self.out_up)
