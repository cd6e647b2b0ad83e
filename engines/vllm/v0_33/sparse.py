"""vLLM's FlashMLA over sparse latents, with metadata that updates in a graph. Kernels, cache and prefill stay vLLM's.

A draft over sparse latents has a second group: its indexer's, whose backend the model's layers pick themselves. vLLM's
own builder of that group updates in place, so this one is all that keeps such a draft from being one graph.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.mla.flashmla_sparse import (
    FlashMLASparseBackend,
    FlashMLASparseMetadata,
    FlashMLASparseMetadataBuilder,
)
from vllm.v1.attention.ops.metadata import compute_token_to_req_indices
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from engines.vllm.v0_33.log import say_update

_QUANTIZED = "fp8_ds_mla"
"""The quantised cache of FlashMLA's sparse decode on Hopper."""


class InGraphSparseBuilder(FlashMLASparseMetadataBuilder):
    """vLLM's metadata: views of its buffers, constants, and a map from tokens to requests that an update writes.

    FlashMLA's schedule for a quantised cache is the kernel's: its first call in a graph makes it there, and later calls
    may keep it, because vLLM passes no lengths that it could depend on.
    """

    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.dummy_block_table.zero_()  # No kernel reads it; the metadata of two builders can be compared.
        say_update(InGraphFlashMlaSparse.get_name(), [])

    def update_draft_decode_metadata(self, metadata: FlashMLASparseMetadata) -> None:
        """Map tokens to requests as a build does, by one kernel: the map is one buffer for all batches of the builder.

        Raises nothing that build() has not.
        """
        tokens = metadata.num_decode_tokens
        compute_token_to_req_indices(metadata.query_start_loc, metadata.req_id_per_token, tokens, tokens)


class InGraphFlashMlaSparse(FlashMLASparseBackend):
    """vLLM's FLASHMLA_SPARSE on Hopper, without what no check has run an update over."""

    @staticmethod
    def get_name() -> str:
        return "FLASHMLA_SPARSE_IN_GRAPH"

    @staticmethod
    def get_builder_cls() -> type[InGraphSparseBuilder]:
        return InGraphSparseBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """DeepSeek-V3.2's. vLLM's takes 512 too: GLM-5.3's, whose third group, a pool's tail, does not update right."""
        return [576]

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False

    @classmethod
    def supports_dcp(cls) -> bool:
        return False

    @classmethod
    def supports_pcp(cls) -> bool:
        return False

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major == 9)

    @classmethod
    def validate_configuration(cls, *args: Any, **asked: Any) -> list[str]:
        """vLLM's reasons in its words, and ours in ours."""
        reasons: list[str] = super().validate_configuration(*args, **asked)
        held = asked.get("kv_cache_dtype")
        if held is not None and is_quantized_kv_cache(held) and held != _QUANTIZED:
            # vLLM gives FLASHMLA_SPARSE this one for any fp8, and knows it by its name.
            reasons.append(f"a quantised KV cache must be {_QUANTIZED}, got {held}; use --kv-cache-dtype {_QUANTIZED}")
        if get_current_vllm_config().attention_config.hisparse_config is not None:
            reasons.append("HiSparse keeps the cache on the host, and prepares each batch there; turn it off")
        return reasons
