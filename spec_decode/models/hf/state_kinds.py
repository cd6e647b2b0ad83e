"""What the recurrent layers of `transformers` compute before and after their recurrence, by class.

Legend: T flat tokens, H hidden size, C channels of [q | k | v], HV value heads, E value dim. Every function gets the
layer, whose modules it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from builders import Recurrence, StateSpec


class Projected(NamedTuple):
    """What a layer projects its hidden states to: three fields of `StateInputs`, and what gates its outputs.

    x      [T, C]
    decay  fp32 [T, *spec.decay_dims]
    beta   [T, spec.matrices]
    gate   [T, HV * E]
    """

    x: Tensor
    decay: Tensor
    beta: Tensor
    gate: Tensor


class LayerConstants(NamedTuple):
    """The last fields of `StateInputs`."""

    weight: Tensor
    bias: Tensor | None
    skip: Tensor | None = None


class StateKind(NamedTuple):
    """A class of layers.

    spec       returns the layer's StateSpec, with a journal of one
    constants  returns what does not depend on tokens
    project    takes hidden states [1, T, H]
    finish     takes outputs [T, HV, E] and the gate, and returns hidden states [T, H]
    """

    spec: Callable[[Any], StateSpec]
    constants: Callable[[Any], LayerConstants]
    project: Callable[[Any, Tensor], Projected]
    finish: Callable[[Any, Tensor, Tensor], Tensor]


def _spec(layer: Any, **fields: Any) -> StateSpec:
    return StateSpec(conv_width=layer.conv_kernel_size, journal=1, dtype=_conv1d(layer).weight.dtype, **fields)


def _conv1d(layer: Any) -> nn.Conv1d:
    return cast(nn.Conv1d, layer.conv if hasattr(layer, "conv") else layer.conv1d)


# 1. The gated delta rule and Kimi Delta Attention


def _gated_delta_spec(layer: Any) -> StateSpec:
    heads = {"num_key_heads": layer.num_k_heads, "num_value_heads": layer.num_v_heads}
    return _spec(layer, **heads, key_dim=layer.head_k_dim, value_dim=layer.head_v_dim)


def _kda_spec(layer: Any) -> StateSpec:
    heads = dict.fromkeys(("num_key_heads", "num_value_heads"), layer.num_heads)
    dims = dict.fromkeys(("key_dim", "value_dim"), layer.head_dim)
    return _spec(layer, recurrence=Recurrence.KDA, **heads, **dims)


def _convolution(layer: Any) -> LayerConstants:
    return LayerConstants(_conv1d(layer).weight.squeeze(1), _conv1d(layer).bias)


def _project_separately(layer: Any, hidden: Tensor) -> Projected:
    projections = (layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_a, layer.in_proj_b)
    x, gate, step, beta = (projection(hidden)[0] for projection in projections)
    return Projected(x, _decay(layer, _step(layer, step)), beta.sigmoid(), gate)


def _project_jointly(layer: Any, hidden: Tensor) -> Projected:
    parts = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden))
    query, key, value, gate, beta, step = (part[0].flatten(1) for part in parts)
    return Projected(torch.cat([query, key, value], -1), _decay(layer, _step(layer, step)), beta.sigmoid(), gate)


def _project_for_olmo(layer: Any, hidden: Tensor) -> Projected:
    step, beta, gate = (projection(hidden)[0] for projection in (layer.a_proj, layer.b_proj, layer.g_proj))
    largest = 2.0 if layer.allow_neg_eigval else 1.0
    return Projected(_joined(layer, hidden), _decay(layer, _step(layer, step)), largest * beta.sigmoid(), gate)


def _project_for_kimi(layer: Any, hidden: Tensor) -> Projected:
    decay, beta, gate = layer.forget_gate(hidden), layer.b_proj(hidden), layer.g_b_proj(layer.g_a_proj(hidden))
    return Projected(_joined(layer, hidden), decay[0], beta[0].sigmoid(), gate[0])


def _joined(layer: Any, hidden: Tensor) -> Tensor:
    return torch.cat([projection(hidden)[0] for projection in (layer.q_proj, layer.k_proj, layer.v_proj)], -1)


def _decay(layer: Any, step: Tensor) -> Tensor:
    # In fp32 before exp, which overflows in fp16.
    return -cast(Tensor, layer.A_log).float().exp() * step


def _step(layer: Any, projected: Tensor) -> Tensor:
    return F.softplus(projected.float() + layer.dt_bias.float())


def _norm_heads(layer: Any, out: Tensor, gate: Tensor, *, norm: str, projection: str) -> Tensor:
    normed = getattr(layer, norm)(out.flatten(0, 1), gate.reshape(-1, out.shape[2]))
    return cast(Tensor, getattr(layer, projection)(normed.view(len(out), -1)))


# 2. Mamba2


def _mamba2_spec(layer: Any) -> StateSpec:
    heads = {"num_key_heads": layer.n_groups, "num_value_heads": layer.num_heads}
    dims = {"key_dim": layer.ssm_state_size, "value_dim": layer.head_dim}
    return _spec(layer, recurrence=Recurrence.SSD, **heads, **dims)


def _mamba2_constants(layer: Any) -> LayerConstants:
    weight, bias = _convolution(layer)[:2]
    bias = None if bias is None else _reordered(layer, bias, 0)
    return LayerConstants(_reordered(layer, weight, 0), bias, layer.D.float())


def _reordered(layer: Any, channels: Tensor, dim: int) -> Tensor:
    """Return [x | B | C] as [C | B | x], which is [q | k | v]."""
    keys = layer.n_groups * layer.ssm_state_size
    return torch.cat(channels.split([layer.intermediate_size, keys, keys], dim)[::-1], dim)


def _project_for_mamba2(layer: Any, hidden: Tensor) -> Projected:
    gate, x, step = layer.in_proj(hidden)[0].split([layer.intermediate_size, layer.conv_dim, layer.num_heads], -1)
    # The library limits the steps of prompts only; a state must not depend on how its tokens were computed.
    step = _step(layer, step).clamp(*layer.time_step_limit)
    return Projected(_reordered(layer, x, 1), _decay(layer, step), step, gate)


def _norm_groups(layer: Any, out: Tensor, gate: Tensor) -> Tensor:
    return cast(Tensor, layer.out_proj(layer.norm(out.flatten(1), gate).to(out.dtype)))


# 3. Short convolutions


def _short_conv_spec(layer: Any) -> StateSpec:
    return _spec(layer, recurrence=Recurrence.CONV, num_value_heads=1, value_dim=layer.conv.in_channels)


def _project_for_short_conv(layer: Any, hidden: Tensor) -> Projected:
    before, after, x = layer.in_proj(hidden)[0].chunk(3, -1)
    none = torch.empty(len(x), 0, dtype=torch.float32, device=x.device)
    return Projected(before * x, none, none, after)


def _gate(layer: Any, out: Tensor, gate: Tensor) -> Tensor:
    return cast(Tensor, layer.out_proj(gate * out.flatten(1)))


_norm_qwen_heads = partial(_norm_heads, norm="norm", projection="out_proj")
_norm_other_heads = partial(_norm_heads, norm="o_norm", projection="o_proj")
_QWEN3_5 = StateKind(_gated_delta_spec, _convolution, _project_separately, _norm_qwen_heads)
_MAMBA2 = StateKind(_mamba2_spec, _mamba2_constants, _project_for_mamba2, _norm_groups)
_SHORT_CONV = StateKind(_short_conv_spec, _convolution, _project_for_short_conv, _gate)
STATE_KINDS = {
    "Qwen3NextGatedDeltaNet": StateKind(_gated_delta_spec, _convolution, _project_jointly, _norm_qwen_heads),
    "Qwen3_5GatedDeltaNet": _QWEN3_5,
    "Qwen3_5MoeGatedDeltaNet": _QWEN3_5,
    "OlmoHybridGatedDeltaNet": StateKind(_gated_delta_spec, _convolution, _project_for_olmo, _norm_other_heads),
    "KimiLinearDeltaAttention": StateKind(_kda_spec, _convolution, _project_for_kimi, _norm_other_heads),
    "NemotronHMamba2Mixer": _MAMBA2,
    "GraniteMoeHybridMambaLayer": _MAMBA2,
    "Lfm2ShortConv": _SHORT_CONV,
    "Lfm2MoeShortConv": _SHORT_CONV,
}
"""By class name: the layers that can be served."""
