"""From published tensors to the parameters of a model."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from spec_decode.models.checkpoints.scoped_weights import ScopedWeights
from spec_decode.models.config import ModelConfig
from spec_decode.models.layers.layer_options import LayerOptions

M = TypeVar("M", bound=nn.Module)


def layer_parameters(
    weights: ScopedWeights, config: ModelConfig, extras: LayerOptions, *, inputs: int | None = None, normed: bool = True
) -> dict[str, torch.Tensor]:
    """The parameters of a PublishedLayer, from the tensors of that part.

    inputs: dims that query, key and value are made of, where they are not the hidden size. normed: whether these pass a
    norm first.
    """
    hidden, wide = config.hidden_size, config.intermediate_size
    rows = [heads * config.head_dim for heads in (config.num_q_heads, config.num_kv_heads, config.num_kv_heads)]
    attention, mlp = weights.under("self_attn."), weights.under("mlp.")
    state: dict[str, torch.Tensor] = {
        "qkv.weight": attention.stacked([f"{part}_proj.weight" for part in "qkv"], rows, inputs or hidden),
        "out.weight": attention.take("o_proj.weight", hidden, rows[0]),
        "mlp_norm.weight": weights.take("post_attention_layernorm.weight", hidden),
        "gate_up.weight": mlp.stacked([f"{part}_proj.weight" for part in ("gate", "up")], [wide] * 2, hidden),
        "down.weight": mlp.take("down_proj.weight", hidden, wide),
    }
    if normed:
        state["attn_norm.weight"] = weights.take("input_layernorm.weight", hidden)
    if extras.qkv_bias:
        biases = [attention.take(f"{part}_proj.bias", count) for part, count in zip("qkv", rows, strict=True)]
        state["qkv.bias"] = torch.cat(biases)
    if extras.out_bias:
        state["out.bias"] = attention.take("o_proj.bias", hidden)
    if extras.qk_norm:
        state |= {f"{part}_norm.weight": attention.take(f"{part}_norm.weight", config.head_dim) for part in "qk"}
    return state


def prefixed(prefix: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors as those of a submodule."""
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


def fill(model: M, state: dict[str, torch.Tensor], device: torch.device) -> M:
    """Give a model that was made on the meta device its parameters, all of them, and make it ready to run."""
    model.load_state_dict(state, assign=True)
    model.eval().requires_grad_(False)
    return model.to(device)
