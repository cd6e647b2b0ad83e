"""The draft models of the fixtures, in plain torch: a backend is judged without the models that ship.

Legend: T tokens, H hidden size, D head_dim, E value_dim, V vocabulary. Weights are drawn from one seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from attn_backends.kernels.latent_rotary import turned
from attn_backends.kernels.rope import Rope
from attn_backends.kernels.write_latent import KvANormRope
from builders import AttentionKind, AttentionSpec
from spec_decode.model_api import Attention, AttentionInputs, BlockDraft, DraftInputs, DraftModel, LayerGroup

_VOCAB, _HIDDEN, _ROTARY, _EPS = 40, 64, 16, 1e-6
"""_ROTARY: how many of a latent's last dims are rotated; grouped heads are rotated whole."""


class PlainDraft(DraftModel):
    """An EAGLE-style draft: layers of attention, without feed-forwards, for the groups of any specs of one kind."""

    def __init__(self, groups: Sequence[LayerGroup], max_positions: int, device: torch.device) -> None:
        super().__init__()
        self.groups, self.max_positions = tuple(groups), max_positions
        self.vocab_size, self.hidden_size, self.target_states_size = _VOCAB, _HIDDEN, _HIDDEN
        spec, generator = groups[0].spec, torch.Generator().manual_seed(0)
        self.embed = _weight(generator, spec, _VOCAB, _HIDDEN)
        self.fuse = _weight(generator, spec, _HIDDEN, 2 * _HIDDEN)
        layers = sorted((layer, group.spec) for group in groups for layer in group.layers)
        self.layers = nn.ModuleList(_Layer(generator, spec, layer) for layer, spec in layers)
        self.head = _weight(generator, spec, _VOCAB, _HIDDEN)
        self.to(device)
        dims = _ROTARY if spec.kind is AttentionKind.MLA else spec.head_dim
        angles = torch.arange(max_positions)[:, None] * 10000.0 ** (-torch.arange(0, dims, 2) / dims)
        # Not a buffer: rotations are in fp32, whatever the precision of the model becomes.
        self.table = torch.cat([angles.cos(), angles.sin()], 1).to(device)

    def on_cpu(self, dtype: torch.dtype) -> PlainDraft:
        """Return a copy on the CPU that computes in another precision."""
        return type(self)(self.groups, self.max_positions, torch.device("cpu")).to(dtype)

    def layer_groups(self, page_size: int) -> list[LayerGroup]:
        """See the base."""
        return [replace(group, spec=replace(group.spec, page_size=page_size)) for group in self.groups]

    def forward(self, inputs: DraftInputs) -> torch.Tensor:
        """See the base."""
        # A tree's tokens are arbitrary if a broken backend's logits are NaN; on a GPU, an invalid id ends the process.
        embedded = self.embed[inputs.token_ids.clamp(0, _VOCAB - 1)]
        x = F.linear(torch.cat([_normed(embedded), inputs.hidden], 1), self.fuse)
        for layer in self.layers:
            x = x + layer(x, Rope(inputs.positions, self.table), inputs.attention)
        return _normed(inputs.kept(x))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See the base."""
        return F.linear(hidden, self.head)


class PlainBlockDraft(BlockDraft, PlainDraft):
    """The same model as a draft that proposes all tokens at once."""

    mask_token_id = 1


class _Layer(nn.Module):
    """Attention with a pre-norm: of grouped heads, or over one latent per token."""

    def __init__(self, generator: torch.Generator, spec: AttentionSpec, layer: int) -> None:
        super().__init__()
        self.spec, self.layer, self.latent = spec, layer, spec.kind is AttentionKind.MLA
        self.heads = [spec.num_q_heads, spec.num_kv_heads, 0 if self.latent else spec.num_kv_heads]
        self.qkv = _weight(generator, spec, sum(self.heads) * spec.head_dim, _HIDDEN)
        self.out = _weight(generator, spec, _HIDDEN, spec.num_q_heads * spec.out_dim)
        self.sinks = _weight(generator, spec, spec.num_q_heads) if spec.sinks else None
        self.latent_norm = _weight(generator, spec, spec.head_dim)

    def forward(self, x: torch.Tensor, rope: Rope, attention: Attention) -> torch.Tensor:
        """Return what the layer adds to x [T, H]."""
        heads = F.linear(_normed(x), self.qkv).unflatten(1, (-1, self.spec.head_dim))
        query, key, value = heads.split(self.heads, 1)
        sinks = None if self.sinks is None else self.sinks.float()
        inputs = AttentionInputs(self.layer, query, key, value, rope=rope, sinks=sinks)
        if self.latent:
            norm = KvANormRope(weight=self.latent_norm, eps=_EPS, positions=rope.positions, table=rope.table)
            query, value = turned(_normed(query), *rope).to(x.dtype), key[..., : self.spec.out_dim]
            inputs = inputs._replace(query=query, value=value, rope=None, kv_a_norm_rope=norm)
        return F.linear(attention(inputs).flatten(1), self.out)


def _normed(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=_EPS)


def _weight(generator: torch.Generator, spec: AttentionSpec, *shape: int) -> nn.Parameter:
    """Draw a weight [outputs, inputs], or a vector, in the spec's dtype."""
    scale = 2.0 * shape[1] ** -0.5 if len(shape) > 1 else 1.0
    return nn.Parameter((scale * torch.randn(shape, generator=generator)).to(spec.dtype), requires_grad=False)
