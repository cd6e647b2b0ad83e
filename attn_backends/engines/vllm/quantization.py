"""Our names for vLLM's `quantization`: the linear layers of the model that chooses one multiply with our kernels.

Tensor parallelism, loading, compilation and capture stay vLLM's. Kernels are imported when a model chooses a name.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from attn_backends.engines.vllm.compat import QuantizationConfig
from attn_backends.engines.vllm.names import PLAIN, ROUNDED


class OurLinears(QuantizationConfig):
    """Linear layers and output projections of 16-bit weights. capability: the lowest that the kernels run on, 8.0."""

    name: ClassVar[str] = PLAIN
    capability: ClassVar[int] = 80

    @classmethod
    def get_name(cls) -> str:
        return cls.name

    @classmethod
    def get_min_capability(cls) -> int:
        return cls.capability

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> OurLinears:
        """Raise ValueError: vLLM calls this for a checkpoint whose config.json names us."""
        raise ValueError(f"{cls.name} reads 16-bit checkpoints only. Remove quantization_config from config.json.")

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return the method of a linear layer or an output projection, and None for any other layer, which stays
        vLLM's: embeddings, attention and experts. Raises ValueError for options that our kernels do not serve."""
        from attn_backends.engines.vllm.linear_methods import method_of

        return method_of(layer, self.name)


class OurFp8Linears(OurLinears):
    """The same, but linear layers have weights in 8 bits, rounded as they load."""

    name, capability = ROUNDED, 89


CONFIGS = (OurLinears, OurFp8Linears)
