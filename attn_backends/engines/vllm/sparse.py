"""vLLM's FlashMLA over sparse latents, with metadata that is updated in the graph. Kernels, cache and prefill stay
vLLM's.

A draft over sparse latents has a second group, for its indexer. The model's layers pick that group's backend, and
vLLM's builder for it already updates in place. With this module's builder, the whole draft can be one graph.
"""

from __future__ import annotations

from typing import Any

import torch

from attn_backends.engines.vllm.backend import UpdatedInGraph, log_update
from attn_backends.engines.vllm.compat import (
    FlashMLASparseBackend,
    FlashMLASparseMetadata,
    FlashMLASparseMetadataBuilder,
    compute_token_to_req_indices,
    get_current_vllm_config,
    is_quantized_kv_cache,
)

_QUANTIZED = "fp8_ds_mla"
"""The one quantised cache format that FlashMLA's sparse decode kernel reads on Hopper."""


class InGraphSparseBuilder(FlashMLASparseMetadataBuilder):
    """vLLM's metadata: constants, views of vLLM's buffers, and a map from tokens to requests, which an update rewrites.

    For a quantised cache, FlashMLA's first call in a graph makes the schedule there. Later calls can reuse it: vLLM
    passes the kernel no lengths, so the schedule does not depend on any.
    """

    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.dummy_block_table.zero_()  # No kernel reads it; the metadata of two builders can be compared.
        log_update(InGraphFlashMlaSparse.name, [])

    def update_draft_decode_metadata(self, metadata: FlashMLASparseMetadata) -> None:
        """Rewrite the map from tokens to requests as build() does, with one kernel: all batches share its buffer.

        build() has already raised every error that this could raise.
        """
        tokens = metadata.num_decode_tokens
        compute_token_to_req_indices(metadata.query_start_loc, metadata.req_id_per_token, tokens, tokens)


class InGraphFlashMlaSparse(UpdatedInGraph, FlashMLASparseBackend):
    """vLLM's FLASHMLA_SPARSE on Hopper, without the features that no check has tested an update with."""

    name = "FLASHMLA_SPARSE_IN_GRAPH"
    builder = InGraphSparseBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """DeepSeek-V3.2's 576. vLLM's backend also takes GLM-5.3's 512, but vLLM updates that model's third group, the
        tail of a pool, wrongly."""
        return [576]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major == 9)

    @classmethod
    def validate_configuration(cls, *args: Any, **config: Any) -> list[str]:
        reasons: list[str] = super().validate_configuration(*args, **config)
        dtype = config.get("kv_cache_dtype")
        if dtype is not None and is_quantized_kv_cache(dtype) and dtype != _QUANTIZED:
            # vLLM turns any fp8 format into this one, but only for the backend named FLASHMLA_SPARSE.
            reasons.append(f"a quantised KV cache must be {_QUANTIZED}, got {dtype}; use --kv-cache-dtype {_QUANTIZED}")
        if get_current_vllm_config().attention_config.hisparse_config is not None:
            reasons.append("HiSparse keeps the cache on the host, and prepares batches there; turn it off")
        return reasons
