"""Recurrent layers of `transformers`: what they compute around the recurrence is theirs, and the recurrence is served.

Legend: T flat tokens, H hidden size, C channels of [q | k | v], HV value heads, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attn_backends import StateInputs, get_state
from builders import BatchBuffers, RequestTables, StateSpec
from spec_decode.models.hf.attention import UnservedModel, server

LINEAR_ATTENTION = "linear_attention"
"""The layer type of wrapped layers in a config."""
_PROBE_TOKENS = 9
"""More than a convolution spans twice, as published."""


class _Projected(NamedTuple):
    """What the projections give for hidden states [1, T, H].

    x           [T, C]
    gate        [T, HV, E]
    step, beta  [T, HV], before softplus and sigmoid
    """

    x: Tensor
    gate: Tensor
    step: Tensor
    beta: Tensor


def _separate(layer: Any, hidden: Tensor) -> _Projected:
    projections = (layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_a, layer.in_proj_b)
    x, gate, step, beta = (projection(hidden)[0] for projection in projections)
    return _Projected(x, gate.unflatten(-1, (-1, layer.head_v_dim)), step, beta)


def _joint(layer: Any, hidden: Tensor) -> _Projected:
    parts = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden))
    query, key, value, gate, beta, step = (part[0] for part in parts)
    return _Projected(torch.cat([part.flatten(1) for part in (query, key, value)], -1), gate, step, beta)


STATE_LAYERS: dict[str, Callable[[Any, Tensor], _Projected]] = {
    "Qwen3NextGatedDeltaNet": _joint,
    "Qwen3_5GatedDeltaNet": _separate,
    "Qwen3_5MoeGatedDeltaNet": _separate,
}
"""By class name: the projections of the layers that can be served."""


def state_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Return the layers of a model that can be served, by layer index."""
    found: list[Any] = [module for module in model.modules() if type(module).__name__ in STATE_LAYERS]
    return {module.layer_idx: module for module in found}


def wrap(layers: dict[int, nn.Module]) -> None:
    """Let these layers be served instead of keeping states themselves.

    Raises UnservedModel for a layer whose own forward computes something else than the recurrence that would be served.
    """
    for index, layer in layers.items():
        try:
            spec = _spec(layer)
            problem = _difference(index, layer, spec)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:  # a release with other parts
            problem = f"{type(error).__name__}: {error}"
        if problem:
            raise UnservedModel(
                f"layer {index} ({type(layer).__name__}) of the installed transformers does not compute the gated "
                f"delta rule that this library serves: {problem}. Use another version of transformers."
            )
        layer.forward = partial(_forward, layer, partial(_served, index, spec))


def _spec(layer: Any) -> StateSpec:
    return StateSpec(
        num_key_heads=layer.num_k_heads,
        num_value_heads=layer.num_v_heads,
        key_dim=layer.head_k_dim,
        value_dim=layer.head_v_dim,
        conv_width=layer.conv_kernel_size,
        journal=1,
        dtype=layer.conv1d.weight.dtype,
    )


def _served(index: int, spec: StateSpec, inputs: StateInputs) -> Tensor:
    return server().recur(index, inputs, spec)


def _forward(layer: Any, recur: Callable[[StateInputs], Tensor], hidden_states: Tensor, **_: Any) -> Tensor:
    """The layer's forward over one row [1, T, H]. Its cache and masks are not used, see `target`."""
    x, gate, step, beta = STATE_LAYERS[type(layer).__name__](layer, hidden_states)
    # In fp32 before exp, which overflows in fp16.
    decay = -layer.A_log.float().exp() * F.softplus(step.float() + layer.dt_bias.float())
    weight, bias = layer.conv1d.weight.squeeze(1), layer.conv1d.bias
    out = recur(StateInputs(x.contiguous(), decay, beta.sigmoid().float(), weight, bias))
    normed = layer.norm(out.flatten(0, 1), gate.flatten(0, 1))
    projected: Tensor = layer.out_proj(normed.view(1, len(out), -1))
    return projected


@torch.no_grad()
def _difference(index: int, layer: Any, spec: StateSpec) -> str:
    """Return how the layer's own forward differs, over a text from its beginning; empty if it does not."""
    backend, device = get_state("torch_state"), layer.conv1d.weight.device
    shape = (1, _PROBE_TOKENS, layer.hidden_size)
    hidden = torch.randn(shape, generator=torch.Generator().manual_seed(index)).to(device, spec.dtype)
    [cache] = backend.allocate_state(spec, 1, 1, device)
    tables = RequestTables(
        page_sizes=[_PROBE_TOKENS], num_pages=[1], max_reqs=1, max_seq_len=_PROBE_TOKENS, device=device
    )
    tables.load([[[0]]], [_PROBE_TOKENS])
    batch = BatchBuffers(tables, max_tokens=_PROBE_TOKENS)
    batch.load([_PROBE_TOKENS], [_PROBE_TOKENS])
    builder = backend.builder(spec, device, max_reqs=1, max_tokens=_PROBE_TOKENS, max_seq_len=_PROBE_TOKENS)
    view = batch.view(0, num_reqs=1, num_tokens=_PROBE_TOKENS, max_query_len=_PROBE_TOKENS)
    metadata = builder.build(view, absorb=True)
    found = _forward(layer, lambda inputs: backend.forward(inputs, cache, metadata, spec=spec), hidden)
    own = type(layer).forward(layer, hidden)  # its own: another target may have wrapped it
    # Wide enough for the rounding of another order of sums.
    allowed = (1e-3 if spec.dtype is torch.float32 else 0.05) * own.abs().max()
    error = (found - own).abs().max()
    return "" if bool(error <= allowed) else f"its outputs differ by up to {error:.3g} of {own.abs().max():.3g}"
