"""Paged attention in Triton: split-KV decode and multi-token extend in one kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_backends.base import AttentionBackend, Sinks, check_forward_inputs
from attn_backends.capabilities import Capabilities, Feature, FusedWrite, Sizes
from attn_backends.fused_writes import FusedRopeWrite
from attn_backends.kernels.paged_attention import PagedAttentionArguments, paged_attention
from attn_backends.kv_cache import KVCache
from builders import AttentionSpec, PagedMetadata, TritonPagedBuilder
from builders.kernels.triton_runtime import TRITON_VERSION, triton_unsupported_reasons


class TritonPaged(FusedRopeWrite, AttentionBackend):
    """Triton kernels on CUDA; on the CPU their torch implementation, or the kernels in Triton's interpreter."""

    name = "triton_paged"
    version = TRITON_VERSION
    contract_version = (1, 3)
    builder = TritonPagedBuilder
    capabilities = Capabilities(
        devices=("cpu", "cuda"),
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        head_dims=Sizes(minimum=64, maximum=256, multiple_of=8),
        page_sizes=Sizes(power_of_two=True),
        features=frozenset(Feature),
        kv_dtypes=(torch.float8_e4m3fn,),
        fused_writes=frozenset({FusedWrite.ROPE}),
    )

    def unsupported_reasons(self, spec: AttentionSpec, device: torch.device) -> list[str]:
        return triton_unsupported_reasons(device.type)

    def allocate_kv(self, spec: AttentionSpec, num_pages: int, device: torch.device) -> KVCache:
        """Allocate each page's keys next to its values, so that one request's reads stay close together."""
        if spec.out_dim != spec.head_dim:
            return super().allocate_kv(spec, num_pages, device)
        shape = (num_pages, 2, spec.page_size, spec.num_kv_heads, spec.head_dim)
        pages = torch.empty(shape, dtype=spec.cache_dtype, device=device)
        return KVCache(pages[:, 0], pages[:, 1])

    def forward(
        self, query: Tensor, cache: KVCache, metadata: PagedMetadata, *, spec: AttentionSpec, sinks: Sinks = None
    ) -> Tensor:
        check_forward_inputs(query, cache, metadata, spec, sinks)
        arguments = PagedAttentionArguments(
            query=query,
            key_cache=cache.key,
            value_cache=cache.value,
            block_table=metadata.block_table,
            seq_lens=metadata.seq_lens,
            query_start_loc=metadata.query_start_loc,
            sinks=sinks,
            tree_masks=metadata.tree_masks,
            max_query_len=metadata.max_query_len,
            max_seq_len=metadata.max_seq_len,
            num_splits=metadata.num_splits,
            scale=spec.softmax_scale,
            sliding_window=spec.sliding_window,
            soft_cap=spec.soft_cap,
            causal=spec.causal,
            batch_invariant=spec.batch_invariant,
            key_scale=cache.key_scale,
            value_scale=cache.value_scale,
        )
        return paged_attention(*arguments)
