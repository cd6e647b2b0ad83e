"""Our names for vLLM's `quantization`: the linear layers of the model that chooses one multiply with our kernels.

Tensor parallelism, loading, compilation and capture stay vLLM's. Kernels are imported when a model chooses a name.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from attn_backends.engines.vllm.compat import QuantizationConfig
from attn_backends.engines.vllm.names import PLAIN, ROUNDED
from builders.devices import FP8_CAPABILITY


class OurLinears(QuantizationConfig):
    """Linear layers and output projections of 16-bit weights, which stay in 16 bits."""

    name: ClassVar[str] = PLAIN
    capability: ClassVar[tuple[int, int]] = (8, 0)
    """The lowest compute capability that the kernels run on."""
    rounds: ClassVar[bool] = False
    """Whether weights of linear layers are rounded to 8 bits as they load."""

    @classmethod
    def get_name(cls) -> str:
        return cls.name

    @classmethod
    def get_min_capability(cls) -> int:
        major, minor = cls.capability
        return 10 * major + minor

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> OurLinears:
        """Refuse a checkpoint: vLLM calls this for one whose config.json names us. Raises ValueError."""
        raise ValueError(
            f"quantization_config in config.json names {cls.name}, which reads only 16-bit checkpoints. Remove it "
            f"there, and choose {cls.name} by --quantization, or for a draft in --speculative-config."
        )

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return the method of a linear layer or an output projection, and None for any other layer, which stays
        vLLM's: embeddings, attention and experts. Raises ValueError for options that our kernels do not serve."""
        from attn_backends.engines.vllm.linear_methods import method_of

        return method_of(layer, name=self.name, rounds=self.rounds)


class OurFp8Linears(OurLinears):
    """The same, with the weights of linear layers in 8 bits and a scale for each output. Output projections stay in 16
    bits."""

    name = ROUNDED
    capability = FP8_CAPABILITY
    rounds = True


CONFIGS = (OurLinears, OurFp8Linears)
