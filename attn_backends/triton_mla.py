"""Dense multi-head latent attention in Triton: split-KV decode and multi-token extend in one kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_backends.base import AttentionBackend, Sinks, check_forward_inputs
from attn_backends.capabilities import Capabilities, Feature, FusedWrite, Sizes
from attn_backends.fused_writes import FusedLatentWrite
from attn_backends.kernels.latent_attention import DIMS, LatentAttentionArguments, latent_attention
from attn_backends.kv_cache import KVCache
from builders import AttentionKind, AttentionSpec, PagedMetadata, TritonMlaBuilder
from builders.kernels.triton_runtime import TRITON_VERSION, triton_unsupported_reasons


class TritonMla(FusedLatentWrite, AttentionBackend):
    """DeepSeek-V3's and GLM-4.7-Flash's attention in absorbed form, for dims such as 512 + 64.

    Triton kernels on CUDA; on the CPU their torch implementation, or the kernels in Triton's interpreter.
    """

    name = "triton_mla"
    version = TRITON_VERSION
    contract_version = (1, 2)
    builder = TritonMlaBuilder
    capabilities = Capabilities(
        devices=("cpu", "cuda"),
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        head_dims=Sizes(among=tuple(sorted({value + rotary for value in DIMS for rotary in DIMS}))),
        value_dims=Sizes(minimum=16, maximum=512, power_of_two=True),
        page_sizes=Sizes(),
        features=frozenset({Feature.GQA, Feature.VALUE_DIM, Feature.BATCH_INVARIANT, Feature.NON_CAUSAL, Feature.TREE}),
        fused_writes=frozenset({FusedWrite.KV_A_NORM_ROPE}),
        required=frozenset({Feature.VALUE_DIM}),
        kinds=(AttentionKind.MLA,),
    )

    def unsupported_reasons(self, spec: AttentionSpec, device: torch.device) -> list[str]:
        reasons = []
        rotary = spec.head_dim - spec.out_dim
        if rotary and (rotary < 16 or rotary & (rotary - 1)):
            reasons.append(f"head_dim - value_dim must be a power of two, at least 16, got {rotary}")
        return reasons + triton_unsupported_reasons(device.type)

    def forward(
        self, query: Tensor, cache: KVCache, metadata: PagedMetadata, *, spec: AttentionSpec, sinks: Sinks = None
    ) -> Tensor:
        check_forward_inputs(query, cache, metadata, spec, sinks)
        arguments = LatentAttentionArguments(
            query=query,
            latent_cache=cache.latents,
            block_table=metadata.block_table,
            seq_lens=metadata.seq_lens,
            query_start_loc=metadata.query_start_loc,
            tree_masks=metadata.tree_masks,
            max_query_len=metadata.max_query_len,
            num_splits=metadata.num_splits,
            value_dim=spec.out_dim,
            scale=spec.softmax_scale,
            causal=spec.causal,
            batch_invariant=spec.batch_invariant,
        )
        return latent_attention(*arguments)
