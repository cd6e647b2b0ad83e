"""Convert the tensors of a checkpoint to the parameters of a model with decoder layers, and back.

Checkpoints store query, key and value, and gate and up, separately; here each group is one matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn

from spec_decode.models.checkpoints.store import ScopedWeights, frozen
from spec_decode.models.layers.linear import FusingLinear

M = TypeVar("M", bound=nn.Module)

_PUBLISHED = {
    "embed": ("embed_tokens",),
    "attn_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "out": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Module names in checkpoints, for modules with different names here."""


def read_parameters(model: M, weights: ScopedWeights, renamed: Callable[[str], str] = str) -> M:
    """Load all parameters that are on the meta device, in the order in which they are stored, and make the model ready
    to run. All are checked, but for their values, before any is read.

    renamed: maps a published tensor name to this checkpoint's. Parameters with the same name share storage. Raises
    CheckpointError.
    """
    sources = {
        path: tuple(map(renamed, _names(path))) for path, parameter in model.named_parameters() if parameter.is_meta
    }
    # Of parameters that share storage the first has the most rows.
    first: dict[tuple[str, ...], str] = {}
    for path, names in sources.items():
        first.setdefault(names, path)
    columns = {path: model.get_parameter(path).shape[1:] for path in sources}
    for names, path in first.items():
        weights.check(names, _rows(model, path), *columns[path])
    taken = {
        names: weights.stacked(names, _rows(model, path), *columns[path])
        for names, path in sorted(first.items(), key=lambda source: min(map(weights.place, source[0])))
    }
    state = {}
    for path, names in sources.items():
        rows, shared = len(model.get_parameter(path)), taken[names]
        state[path] = shared if len(shared) == rows else frozen(shared[:rows])
    model.load_state_dict(state, assign=True, strict=False)
    return model.eval().requires_grad_(False).to(weights.device)


def published_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters under the names that `read_parameters` looks up, as views in their dtype."""
    return {
        name: part
        for path, parameter in model.named_parameters()
        for name, part in zip(_names(path), parameter.detach().split(list(_rows(model, path))), strict=True)
    }


def _names(path: str) -> list[str]:
    """Return the checkpoint's names of the tensors that are stacked in the parameter at `path`."""
    *prefix, module, kind = path.split(".")
    return [".".join([*prefix, part, kind]) for part in _PUBLISHED.get(module, (module,))]


def _rows(model: nn.Module, path: str) -> Sequence[int]:
    """Return the number of rows of each tensor in the parameter at `path`."""
    layer = model.get_submodule(path.rpartition(".")[0])
    return layer.outputs if isinstance(layer, FusingLinear) else model.get_parameter(path).shape[:1]
