"""Dense multi-head latent attention in absorbed form (DeepSeek-V2, arXiv:2405.04434, section 2.1).

Legend: T tokens, H hidden size, h heads, N unrotated dims of a head, P rotated dims, R dims of a latent, V dims of a
value head. A head's key concatenates the latent's up-projection and P rotated dims that all heads share. Folding the
up-projections into the query and the output lets all heads attend over one key: latent | rotated dims. Floats are in
the weights' dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from attn_backends.kernels.linear.fp8_weight import Weight
from attn_backends.kernels.linear.linear import linear, stacked_linear
from attn_backends.kernels.rope import Rope
from builders import AttentionKind, AttentionSpec
from spec_decode.model_api import Attention, AttentionInputs, KeepRows
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.store import ScopedWeights, frozen
from spec_decode.models.kernels.mla_query_key import mla_query_key
from spec_decode.models.layers.rms_norm import RMSNorm
from spec_decode.models.layers.rope import RopeConfig, Yarn, read_latent_rope


@dataclass(frozen=True, kw_only=True, slots=True)
class MlaShape:
    """Sizes of one attention layer."""

    hidden: int
    heads: int
    q_rank: int | None
    """None: queries are not low-rank."""
    kv_rank: int
    nope_dim: int
    value_dim: int
    rope: RopeConfig
    eps: float

    @property
    def query_dim(self) -> int:
        """Dims of a head's query before absorption: N + P."""
        return self.nope_dim + self.rope.dims

    def spec(self, page_size: int, dtype: torch.dtype) -> AttentionSpec:
        """Return the spec of the absorbed attention, with the scale of the unabsorbed heads."""
        factor = self.rope.scaling.softmax_factor if isinstance(self.rope.scaling, Yarn) else 1.0
        return AttentionSpec(
            num_q_heads=self.heads,
            num_kv_heads=1,
            head_dim=self.kv_rank + self.rope.dims,
            value_dim=self.kv_rank,
            page_size=page_size,
            dtype=dtype,
            scale=self.query_dim**-0.5 * factor,
            kind=AttentionKind.MLA,
        )


def read_mla_shape(config: ConfigReader, hidden: int, eps: float) -> MlaShape:
    """Read the attention from config.json. Raises CheckpointError for an impossible one."""
    return MlaShape(
        hidden=hidden,
        heads=config.get("num_attention_heads", int),
        q_rank=config.optional("q_lora_rank", int),
        kv_rank=config.get("kv_lora_rank", int),
        nope_dim=config.get("qk_nope_head_dim", int),
        value_dim=config.get("v_head_dim", int),
        rope=read_latent_rope(config, config.get("qk_rope_head_dim", int)),
        eps=eps,
    )


class MlaAttention(nn.Module):
    """The attention of one layer, loaded from tensors with DeepSeek-V3's names."""

    project_in: Weight
    q_up: Weight | None
    out: Weight

    def __init__(self, shape: MlaShape, weights: ScopedWeights, *, inputs: int | None = None) -> None:
        """inputs: dims of the input of the query and latent projections; None: `shape.hidden`."""
        super().__init__()
        self.shape = shape
        latent = shape.kv_rank + shape.rope.dims
        first = "q_proj" if shape.q_rank is None else "q_a_proj"
        self.queries = shape.heads * shape.query_dim if shape.q_rank is None else shape.q_rank
        names = [f"{first}.weight", "kv_a_proj_with_mqa.weight"]
        self.project_in = weights.stacked(names, [self.queries, latent], inputs or shape.hidden)
        self.q_norm = self.q_up = None
        if shape.q_rank is not None:
            self.q_norm = RMSNorm.read(weights, "q_a_layernorm.weight", shape.q_rank, shape.eps)
            self.q_up = weights.parameter("q_b_proj.weight", shape.heads * shape.query_dim, shape.q_rank)
        self.kv_norm = RMSNorm.read(weights, "kv_a_layernorm.weight", shape.kv_rank, shape.eps)
        ups = weights.take("kv_b_proj.weight", shape.heads * (shape.nope_dim + shape.value_dim), shape.kv_rank)
        key_up, value_up = ups.unflatten(0, (shape.heads, -1)).split([shape.nope_dim, shape.value_dim], 1)
        self.key_up, self.value_up = frozen(key_up.contiguous()), frozen(value_up.contiguous())
        self.out = weights.parameter("o_proj.weight", shape.hidden, shape.heads * shape.value_dim)

    def forward(
        self, x: torch.Tensor, rope: Rope, layer: int, attention: Attention, keep: KeepRows | None = None
    ) -> torch.Tensor:
        """Return the residual's delta [T, H], for the kept rows. x: [T, H or inputs], normed."""
        shape = self.shape
        query, latent = linear(x, self.project_in).split([self.queries, shape.kv_rank + shape.rope.dims], -1)
        if self.q_norm is not None and self.q_up is not None:
            query = linear(self.q_norm(query)[1], self.q_up)
        nope, rotated = query.unflatten(-1, (shape.heads, -1)).split([shape.nope_dim, shape.rope.dims], -1)
        absorbed = stacked_linear(nope, self.key_up.mT)
        query, key = mla_query_key(absorbed, rotated, latent, self.kv_norm.weight, shape.eps, rope)
        out = attention(AttentionInputs(layer, query, key, key[..., : shape.kv_rank]))
        values = stacked_linear(out if keep is None else keep(out), self.value_up)
        return linear(values.flatten(1), self.out)
