"""Convert the tensors of a checkpoint to the parameters of a model with decoder layers, and back.

Checkpoints store query, key and value, and gate and up, separately; here each group is one matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

from attn_backends.kernels.linear.fp8_weight import Fp8Weight
from spec_decode.models.checkpoints.store import ScopedWeights, frozen, held
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
    """Load all parameters that are on the meta device, in the order in which they are stored, and make the model ready
    to run. All are checked, but for their values, before any is read.

    renamed: maps a published tensor name to this checkpoint's. layout: replaces names of Llama's. Parameters with the
    same name share storage, except the 8-bit copy of a tied head. Raises CheckpointError.
    """
    sources = {
        path: tuple(map(renamed, _names(path, layout)))
        for path, parameter in model.named_parameters()
        if parameter.is_meta
    }
    # Of parameters that share storage the first has the most rows.
    first: dict[tuple[str, ...], str] = {}
    for path, names in sources.items():
        first.setdefault(names, path)
    sizes = {path: model.get_parameter(path).shape for path in sources}
    rows = {path: _rows(model, path) if len(names) > 1 else sizes[path][:1] for names, path in first.items()}
    for names, path in first.items():
        weights.check(names, rows[path], *sizes[path][1:])
    taken: dict[tuple[str, ...], nn.Parameter | Fp8Weight] = {}
    for names, path in sorted(first.items(), key=lambda source: min(map(weights.place, source[0]))):
        layer = _layer(model, path)
        if isinstance(layer, RMSNorm):
            taken[names] = layer.stored(weights, *names)
        else:
            read = weights.product if _multiplies(model, path) else weights.stacked
            taken[names] = read(names, rows[path], *sizes[path][1:])
    for path, names in sources.items():
        weight, count, kind = taken[names], len(model.get_parameter(path)), path.rpartition(".")[2]
        if isinstance(weight, nn.Parameter):
            # A tied head can have fewer rows than the embedding that it shares.
            weight = weight if len(weight) == count else frozen(weight[:count])
            weight = held(weights.rounded(weight)) if _multiplies(model, path) else weight
        # nn.Module rejects a module under the name of a parameter.
        delattr(_layer(model, path), kind)
        setattr(_layer(model, path), kind, weight)
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


def _layer(model: nn.Module, path: str) -> nn.Module:
    """Return the module that has the parameter at `path`."""
    return model.get_submodule(path.rpartition(".")[0])


def _multiplies(model: nn.Module, path: str) -> bool:
    """Whether the parameter at `path` is the weight of a product."""
    return path.endswith(".weight") and isinstance(_layer(model, path), FusingLinear)


def _rows(model: nn.Module, path: str) -> Sequence[int]:
    """Return the number of rows of each tensor in the parameter at `path`."""
    layer = _layer(model, path)
    return layer.outputs if isinstance(layer, FusingLinear) else model.get_parameter(path).shape[:1]
