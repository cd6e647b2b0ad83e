"""Experts of `transformers` models, computed by this library's grouped products.

The library's default is torch's grouped product. It reads the host in fp32 and fp16, and in bf16 on GPUs other than
Hopper and Blackwell, and no graph can hold that.

Legend: T tokens, H hidden size, I intermediate size, E experts, k experts of a token.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from attn_backends.kernels.linear.swiglu import activated
from spec_decode.models.hf.attention import UnservedModel
from spec_decode.models.hf.state_layers import difference
from spec_decode.models.kernels.combine_experts import combine_experts
from spec_decode.models.kernels.order_by_expert import order_by_expert
from spec_decode.models.layers.linear import grouped_gated_linear, grouped_linear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EXPERTS_NAME = "attn_backends_grouped"
"""The function's registered name."""
_DEFAULT = "grouped_mm"
"""The library's choice if config.json has no experts_implementation."""
_PROBE = torch.tensor([[3, 0], [1, 2], [2, 1]])
"""Experts of three tokens, by index modulo E."""

try:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as _FUNCTIONS
except ImportError:  # before version 5: each model loops over its experts
    _FUNCTIONS = None


def serve_experts(model: PreTrainedModel, device: torch.device) -> bool:
    """Let this library compute a model's experts on a GPU, unless its config chooses another way than the default.
    Return whether it computes them.

    Decided once and for all layers: if one differs, such as by transposed or quantised weights, all keep the library's
    own function. Raises UnservedModel for such a layer if the config chooses EXPERTS_NAME.
    """
    layers: dict[str, Any] = {name: each for name, each in model.named_modules() if hasattr(each, "is_transposed")}
    chosen = {layer.config._experts_implementation for layer in layers.values()}
    if chosen != {EXPERTS_NAME} and (chosen != {_DEFAULT} or device.type == "cpu"):
        return False
    problems = (f"{name} ({type(layer).__name__}): {why}" for name, layer in layers.items() if (why := _problem(layer)))
    if problem := next(problems, None):
        if chosen == {EXPERTS_NAME}:
            raise UnservedModel(f"experts_implementation {EXPERTS_NAME} cannot compute {problem}. Remove it.")
        return False
    with suppress(ValueError):  # the first releases with a registry accept only their own names
        model.set_experts_implementation(EXPERTS_NAME)
    return {layer.config._experts_implementation for layer in layers.values()} == {EXPERTS_NAME}


@torch.no_grad()
def _problem(layer: Any) -> str:
    """Return why `_experts` cannot compute a layer; empty if it can. Records how the layer gates."""
    if layer.is_transposed or getattr(layer, "_is_expert_parallel", False):
        return "its weights are transposed" if layer.is_transposed else "its experts are on several devices"
    try:
        weight, generator = layer.gate_up_proj if layer.has_gate else layer.up_proj, torch.Generator().manual_seed(0)
        rows = torch.linspace(-30, 30, 8 * weight.shape[1], device=weight.device).view(8, -1)
        layer.is_swiglu = layer.has_gate and torch.allclose(layer._apply_gate(rows), activated(rows))
        hidden, weights = torch.randn(3, weight.shape[-1], generator=generator), torch.rand(3, 2, generator=generator)
        inputs = hidden.to(weight), (_PROBE % len(weight)).to(weight.device), weights.to(weight.device)
        return difference(_experts(layer, *inputs), _FUNCTIONS["batched_mm"](layer, *inputs))
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:  # quantised, or a release with other parts
        return f"{type(error).__name__}: {error}"


def _experts(layer: Any, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The function that the library calls for each layer: returns [T, H] for hidden [T, H], and int64 and floating
    [T, k]. Sums are in fp32 and rounded once."""
    x = hidden.to(layer.down_proj.dtype)
    tokens, places, ends = order_by_expert(experts.long(), len(layer.down_proj))
    name = "gate_up_proj" if layer.has_gate else "up_proj"
    weight, bias = getattr(layer, name), getattr(layer, f"{name}_bias") if layer.has_bias else None
    if layer.is_swiglu:
        inner = grouped_gated_linear(x, tokens, weight, ends, bias=bias)
    else:
        inner = grouped_linear(x[tokens], weight, ends, bias)
        inner = layer._apply_gate(inner) if layer.has_gate else layer.act_fn(inner)
    rows = grouped_linear(inner, layer.down_proj, ends, layer.down_proj_bias if layer.has_bias else None)
    return combine_experts(rows, weights.float(), places, None).to(hidden.dtype)


if _FUNCTIONS is not None:
    _FUNCTIONS.register(EXPERTS_NAME, _experts)
