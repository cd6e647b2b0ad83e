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
from attn_backends.kernels.linear import linear_op  # noqa: F401  # defines the op
from attn_backends.kernels.linear.fp8_weight import READING, Fp8Weight

_log = init_logger("vllm.attn_backends")


def method_of(layer: torch.nn.Module, name: str) -> Any:
    """Return the method of a layer, None for layers that are neither linear nor an output projection. A layer whose
    weights do not have 16 bits, such as a router in fp32, keeps vLLM's. name: PLAIN or ROUNDED. Raises ValueError for
    options that our kernels do not serve."""
    if reasons := option_reasons(get_current_vllm_config()):
        raise ValueError(
            f"quantization {name!r} does not serve these options, so vLLM was not started: {'; '.join(reasons)}."
        )
    if isinstance(layer, LinearBase):
        if layer.params_dtype not in READING:
            return UnquantizedLinearMethod()
        return RoundedLinear() if name == ROUNDED else PlainLinear()
    if isinstance(layer, ParallelLMHead):
        return PlainHead()
    if name == ROUNDED and isinstance(layer, RoutedExperts):
        _log.warning_once("%s leaves the weights of experts in 16 bits.", name)
    return None


def option_reasons(config: Any) -> list[str]:
    """List the options of a VllmConfig, and what to do, that our kernels do not serve."""
    reasons = {
        "it runs on CUDA only": not current_platform.is_cuda(),
        "it adds no LoRA adapters; start without --enable-lora": config.lora_config is not None,
        "its sums depend on the number of rows; unset VLLM_BATCH_INVARIANT": envs.VLLM_BATCH_INVARIANT,
        "it chooses the kernels itself; leave out --linear-backend": config.kernel_config.linear_backend != "auto",
    }
    return [reason for reason, applies in reasons.items() if applies]


def multiply(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return x [..., K] @ weight [N, K]^T * scale [N] + bias [N], [..., N] in x's dtype."""
    out: torch.Tensor = torch.ops.attn_backends.linear(x.reshape(-1, x.shape[-1]), weight, scale, bias)
    return out.view(*x.shape[:-1], out.shape[-1])


class PlainLinear(UnquantizedLinearMethod):
    """A layer with 16-bit weights. As vLLM's own unquantised method, it never changes them."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return multiply(x, layer.weight, None, bias)


class PlainHead(UnquantizedEmbeddingMethod):
    """An output projection with 16-bit weights, possibly the embedding's."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return multiply(x, layer.weight, None, bias)


class RoundedLinear(OnlineLinearBase):
    """A layer with 8-bit weights: `weight` float8_e4m3fn [N, K] and `weight_scale` fp32 [N].

    vLLM loads the 16-bit weight of one layer at a time, then calls `process_weights_after_loading`. When it reloads
    weights, it does the same and copies the results into the tensors that its graphs read.
    """

    activation_quant_key = None

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        rounded = Fp8Weight.of(layer.weight)
        replace_parameter(layer, "weight", rounded.values)
        replace_parameter(layer, "weight_scale", rounded.scale)
        layer._already_called_process_weights_after_loading = True

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return multiply(x, layer.weight, layer.weight_scale, bias)
