"""vLLM's methods of linear layers over our kernels: who makes, loads and reloads the weights, and who multiplies."""

from __future__ import annotations

from typing import Any

import torch

from attn_backends.engines.vllm.compat import (
    LinearBase,
    OnlineLinearBase,
    ParallelLMHead,
    RoutedExperts,
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
    current_platform,
    envs,
    get_current_vllm_config,
    init_logger,
    replace_parameter,
)
from attn_backends.engines.vllm.names import ROUNDED
from attn_backends.engines.vllm.reasons import not_started
from attn_backends.kernels.linear.fp8_weight import READING, Fp8Weight
from attn_backends.kernels.linear.linear_op import LinearArguments, linear_op
from attn_backends.kernels.linear.warm_up import warm_up

_log = init_logger("vllm.attn_backends")


def method_of(layer: torch.nn.Module, name: str) -> Any:
    """Return the method of a layer, None for layers that are neither linear nor an output projection. A layer whose
    weights do not have 16 bits, such as a router in fp32, keeps vLLM's. name: PLAIN or ROUNDED. Raises ValueError for
    options that our kernels do not serve."""
    require_served(get_current_vllm_config(), name)
    if isinstance(layer, LinearBase):
        if layer.params_dtype not in READING:
            return UnquantizedLinearMethod()
        return RoundedLinear() if name == ROUNDED else PlainLinear()
    if isinstance(layer, ParallelLMHead):
        return PlainHead()
    if name == ROUNDED and isinstance(layer, RoutedExperts):
        _log.warning_once("%s leaves the weights of experts in 16 bits.", name)
    return None


def require_served(config: Any, name: str) -> None:
    """Raise ValueError, with what to do, for options of a VllmConfig that our kernels do not serve."""
    backend = config.kernel_config.linear_backend
    reasons = {
        "the device is no CUDA GPU, and the kernels run on nothing else. Leave the quantization out.": (
            not current_platform.is_cuda()
        ),
        "LoRA is on, and it adds no adapters. Start without --enable-lora.": config.lora_config is not None,
        "VLLM_BATCH_INVARIANT is set, and its sums depend on the number of rows. Unset it.": envs.VLLM_BATCH_INVARIANT,
        f"--linear-backend is {backend}, and it chooses the kernels itself. Leave it out.": backend != "auto",
    }
    if found := [reason for reason, applies in reasons.items() if applies]:
        raise ValueError(not_started(f"quantization {name!r} does not serve these options", found))


def multiply(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return x [..., K] @ weight [N, K]^T * scale [N] + bias [N], [..., N] in x's dtype."""
    out: torch.Tensor = torch.ops.attn_backends.linear(x.reshape(-1, x.shape[-1]), weight, scale, bias)
    return out.view(*x.shape[:-1], out.shape[-1])


def compile_kernels(layer: Any, dtype: torch.dtype) -> None:
    """Compile what the layer needs for rows of this dtype, once it is loaded: vLLM's graphs need only some of it, and
    its JIT registry takes no kernels of drafts. One rank of several adds a bias."""
    weight, scale = layer.weight, getattr(layer, "weight_scale", None)
    for bias in {None, getattr(layer, "bias", None)}:
        warm_up(linear_op, LinearArguments(weight.data.new_empty(0, weight.shape[1], dtype=dtype), weight, scale, bias))


class _Plain:
    """16-bit weights, which stay as they are loaded. A mixin for vLLM's unquantised methods."""

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)  # type: ignore[misc]
        compile_kernels(layer, layer.weight.dtype)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return multiply(x, layer.weight, None, bias)


class PlainLinear(_Plain, UnquantizedLinearMethod):
    """A layer with 16-bit weights."""


class PlainHead(_Plain, UnquantizedEmbeddingMethod):
    """An output projection with 16-bit weights, possibly the embedding's."""


class RoundedLinear(OnlineLinearBase):
    """A layer with 8-bit weights: `weight` float8_e4m3fn [N, K] and `weight_scale` fp32 [N].

    vLLM loads the 16-bit weight of one layer at a time, then calls `process_weights_after_loading`. When it reloads
    weights, it does the same and copies the results into the tensors that its graphs read.
    """

    activation_quant_key = None

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        rounded, dtype = Fp8Weight.of(layer.weight), layer.weight.dtype
        replace_parameter(layer, "weight", rounded.values)
        replace_parameter(layer, "weight_scale", rounded.scale)
        layer._already_called_process_weights_after_loading = True
        compile_kernels(layer, dtype)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return multiply(x, layer.weight, layer.weight_scale, bias)
