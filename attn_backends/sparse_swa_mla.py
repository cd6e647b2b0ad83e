"""Sparse sliding-window latent attention (DeepSeek-V4's) in Triton, over lists of cache slots.

See builders/sparse_window.py for its builder.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_backends.base import AttentionBackend, Sinks, check_forward_inputs
from attn_backends.capabilities import Capabilities, Feature, FusedWrite, Sizes
from attn_backends.fused_writes import FusedLatentWrite
from attn_backends.kernels.sparse_attention import SparseAttentionArguments, sparse_attention
from attn_backends.kv_cache import KVCache
from builders import AttentionKind, AttentionSpec
from builders.devices import FP8_CAPABILITY, converts_fp8
from builders.kernels.triton_runtime import TRITON_VERSION, triton_unsupported_reasons
from builders.sparse_window import SparseWindowBuilder, SparseWindowMetadata


class SparseSwaMla(FusedLatentWrite, AttentionBackend):
    """One latent per token, key and value in all of its dims, in the query's dtype or fp8_ds_mla.

    Triton kernels on CUDA; on the CPU their torch implementation, or the kernels in Triton's interpreter.
    """

    name = "sparse_swa_mla"
    version = TRITON_VERSION
    contract_version = (1, 2)
    builder = SparseWindowBuilder
    capabilities = Capabilities(
        devices=("cpu", "cuda"),
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        kv_dtypes=(torch.float8_e4m3fn,),
        head_dims=Sizes(minimum=64, maximum=512, power_of_two=True),
        page_sizes=Sizes(),
        features=frozenset({Feature.GQA, Feature.SLIDING_WINDOW, Feature.SINKS, Feature.BATCH_INVARIANT}),
        fused_writes=frozenset({FusedWrite.KV_A_NORM_ROPE}),
        required=frozenset({Feature.SLIDING_WINDOW}),
        kinds=(AttentionKind.MLA,),
    )

    def unsupported_reasons(self, spec: AttentionSpec, device: torch.device) -> list[str]:
        reasons = triton_unsupported_reasons(device.type)
        if spec.cache_dtype == torch.float8_e4m3fn and not converts_fp8(device):
            found = torch.cuda.get_device_capability(device)
            reasons.append(f"an fp8_ds_mla cache needs compute capability {FP8_CAPABILITY}, the device has {found}")
        return reasons

    def forward(
        self, query: Tensor, cache: KVCache, metadata: SparseWindowMetadata, *, spec: AttentionSpec, sinks: Sinks = None
    ) -> Tensor:
        check_forward_inputs(query, cache, metadata, spec, sinks)
        arguments = SparseAttentionArguments(
            query=query,
            cache=cache.latents,
            indices=metadata.window_indices,
            lens=metadata.window_lens,
            sinks=sinks,
            page_size=spec.page_size,
            scale=spec.softmax_scale,
            batch_invariant=spec.batch_invariant,
        )
        return sparse_attention(*arguments)
