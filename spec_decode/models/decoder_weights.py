"""Convert the tensors of a checkpoint to the parameters of a model with decoder layers, and back.

Checkpoints store query, key and value, and gate and up, separately; here each group is one matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

from spec_decode.models.checkpoints.store import ScopedWeights, frozen
from spec_decode.models.kernels.fp8_weight import Fp8Weight
from spec_decode.models.layers.linear import FusingLinear
from spec_decode.models.layers.rms_norm import RMSNorm

M = TypeVar("M", bound=nn.Module)

Layout = Mapping[str, tuple[str, ...]]
"""The names in a checkpoint of what one module here holds, for modules with other names or with stacked parts."""

_PUBLISHED: Layout = {
    "embed": ("embed_tokens",),
    "attn_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "out": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    "attn_out_norm": ("post_attention_layernorm",),
    "mlp_out_norm": ("post_feedforward_layernorm",),
}
"""Llama's."""
FUSED_GATE_UP: Layout = {"gate_up": ("mlp.gate_up_proj",)}
FUSED: Layout = {"qkv": ("self_attn.qkv_proj",), **FUSED_GATE_UP}
"""Of checkpoints that store the stacked matrices, with parts in the order that they have here."""


def read_parameters(
    model: M, weights: ScopedWeights, renamed: Callable[[str], str] = str, layout: Layout = _PUBLISHED
) -> M:
    """Load all parameters that are on the meta device, and make the model ready to run.

    renamed: maps a published tensor name to this checkpoint's. layout: replaces names of Llama's. Parameters with the
    same name share storage, except the 8-bit copy of a tied head. Raises CheckpointError.
    """
    taken: dict[tuple[str, ...], nn.Parameter] = {}
    for path, parameter in list(model.named_parameters()):
        if not parameter.is_meta:
            continue
        place, _, kind = path.rpartition(".")
        layer, names, rows = model.get_submodule(place), tuple(map(renamed, _names(path, layout))), len(parameter)
        multiplies = kind == "weight" and isinstance(layer, FusingLinear)
        weight: nn.Parameter | Fp8Weight | None = taken.get(names)
        if isinstance(layer, RMSNorm):
            weight = layer.stored(weights, *names)
        elif weight is None:
            read = weights.product if multiplies else weights.stacked
            weight = read(names, _rows(model, path) if len(names) > 1 else [rows], *parameter.shape[1:])
        if isinstance(weight, nn.Parameter):
            taken[names] = weight
            # A tied head can have fewer rows than the embedding that it shares.
            weight = weight if len(weight) == rows else frozen(weight[:rows])
            weight = Fp8Weight.of(weight) if multiplies and weights.quantises else weight
        # nn.Module rejects a module under the name of a parameter.
        delattr(layer, kind)
        setattr(layer, kind, weight)
    return model.eval().requires_grad_(False).to(weights.device)


def published_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters under the names that `read_parameters` looks up, as views in their dtype."""
    return {
        name: part
        for path, parameter in model.named_parameters()
        for name, part in zip(_names(path, _PUBLISHED), parameter.detach().split(list(_rows(model, path))), strict=True)
    }


def _names(path: str, layout: Layout) -> list[str]:
    """Return the checkpoint's names of the tensors that are stacked in the parameter at `path`."""
    *prefix, module, kind = path.split(".")
    return [".".join([*prefix, part, kind]) for part in layout.get(module, _PUBLISHED.get(module, (module,)))]


def _rows(model: nn.Module, path: str) -> Sequence[int]:
    """Return the number of rows of each tensor in the parameter at `path`."""
    layer = model.get_submodule(path.rpartition(".")[0])
    return layer.outputs if isinstance(layer, FusingLinear) else model.get_parameter(path).shape[:1]
