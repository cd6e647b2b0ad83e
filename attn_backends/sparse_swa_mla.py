"""Sparse sliding-window latent attention (DeepSeek-V4's) in Triton, over lists of cache slots."""

from __future__ import annotations

import torch

from attn_backends.base import AttentionBackend, KVCache, check_forward_inputs
from attn_backends.capabilities import Capabilities, Feature, Sizes
from attn_backends.kernels.sparse_attention import IndexedCache, sparse_attention
from builders import AttentionKind, AttentionSpec, SparseSwaBuilder, SparseSwaMetadata
from builders.kernels.triton_runtime import TRITON_VERSION, lacks_triton


class SparseSwaMla(AttentionBackend):
    """One latent per token, key and value in all of its dims, plain or packed in fp8.

    On CUDA the Triton kernels; on the CPU their torch implementation, or the kernels in Triton's interpreter.
    """

    name = "sparse_swa_mla"
    version = TRITON_VERSION
    contract_version = (1, 0)
    builder = SparseSwaBuilder
    capabilities = Capabilities(
        devices=("cpu", "cuda"),
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        kv_dtypes=(torch.float8_e4m3fn,),
        head_dims=Sizes(minimum=64, maximum=512, power_of_two=True),
        page_sizes=Sizes(),
        features=frozenset({Feature.GQA, Feature.SLIDING_WINDOW, Feature.SINKS}),
        required=frozenset({Feature.SLIDING_WINDOW}),
        kinds=(AttentionKind.MLA,),
        extra_lists=True,
    )

    def further_reasons(self, spec: AttentionSpec, device: torch.device) -> list[str]:
        return lacks_triton(device.type)

    def forward(
        self,
        query: torch.Tensor,
        cache: KVCache,
        metadata: SparseSwaMetadata,
        *,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
        extra: IndexedCache | None = None,
    ) -> torch.Tensor:
        """See AttentionBackend. extra: entries of a second, compressed cache in the same softmax (the C4A and C128A
        layers), listed by builders.compressed.
        """
        check_forward_inputs(query, cache, metadata, spec, sinks)
        window = IndexedCache(cache.latents, metadata.window_indices, metadata.window_lens, spec.page_size)
        return sparse_attention(query, window, scale=spec.softmax_scale, sinks=sinks, extra=extra)
