"""FlashMLA's sparse kernels on Hopper, from any package with them: DeepSeek-V4's attention over window lists."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_backends.base import AttentionBackend, Sinks, check_forward_inputs
from attn_backends.capabilities import Capabilities, Feature, FusedWrite, Sizes
from attn_backends.flashmla_package import SPARSE, flashmla_version, load_flashmla
from attn_backends.fused_writes import FusedLatentWrite
from attn_backends.kv_cache import FP8_DS_MLA, KVCache, cache_layout
from builders import NO_SLOT, AttentionKind, AttentionSpec
from builders.errors import BatchError
from builders.flashmla_sparse import FlashMlaSparseBuilder, FlashMlaSparseMetadata

flashmla = load_flashmla(SPARSE)

_HEADS = (64, 128)


class ScheduledBuilder(FlashMlaSparseBuilder):
    """Has FlashMLA make the schedules, which it does in its first call with one."""

    def make_schedule(self, num_tokens: int) -> Any:
        schedule, _ = flashmla.get_mla_metadata()
        if (layout := cache_layout(self.spec)) is FP8_DS_MLA:
            spec, device = self.spec, self.device
            query = torch.zeros(num_tokens, spec.num_q_heads, spec.head_dim, dtype=spec.dtype, device=device)
            nothing = torch.full((num_tokens, 1, self.width), NO_SLOT, dtype=torch.int32, device=device)
            _decode(query, layout.allocate(spec, 1, device), nothing, schedule, spec, None)
        return schedule


class FlashMlaSparse(FusedLatentWrite, AttentionBackend):
    """fp8_ds_mla runs on the decode kernel, with every token as its own request; bf16 runs on the prefill kernel."""

    name = "flashmla_sparse"
    version = flashmla_version(flashmla)
    contract_version = (1, 2)
    builder = ScheduledBuilder
    capabilities = Capabilities(
        devices=("cuda",),
        dtypes=(torch.bfloat16,),
        kv_dtypes=(torch.float8_e4m3fn,),
        head_dims=Sizes(minimum=512, maximum=512),
        page_sizes=Sizes(),
        features=frozenset({Feature.GQA, Feature.SLIDING_WINDOW, Feature.SINKS}),
        fused_writes=frozenset({FusedWrite.KV_A_NORM_ROPE}),
        required=frozenset({Feature.SLIDING_WINDOW}),
        kinds=(AttentionKind.MLA,),
        compute_capability=(9, 0),
        one_major_version=True,
    )

    def unsupported_reasons(self, spec: AttentionSpec, device: torch.device) -> list[str]:
        return [] if spec.num_q_heads in _HEADS else [f"num_q_heads must be 64 or 128, got {spec.num_q_heads}"]

    def forward(
        self,
        query: Tensor,
        cache: KVCache,
        metadata: FlashMlaSparseMetadata,
        *,
        spec: AttentionSpec,
        sinks: Sinks = None,
    ) -> Tensor:
        check_forward_inputs(query, cache, metadata, spec, sinks)
        query, indices = query.contiguous(), metadata.window_indices[:, None]
        if cache_layout(spec) is FP8_DS_MLA:
            return _decode(query, cache, indices, metadata.schedule.made, spec, sinks)
        out: Tensor = flashmla.flash_mla_sparse_fwd(
            query, _listed(cache.key), indices, spec.softmax_scale, d_v=spec.head_dim, attn_sink=sinks
        )[0]
        return out


def _decode(query: Tensor, cache: KVCache, indices: Tensor, schedule: Any, spec: AttentionSpec, sinks: Sinks) -> Tensor:
    """query [T, num_q_heads, head_dim], indices int32 [T, 1, W]; the same out."""
    out: Tensor = flashmla.flash_mla_with_kvcache(
        q=query[:, None],
        k_cache=cache.key,
        block_table=None,
        cache_seqlens=None,
        head_dim_v=spec.head_dim,
        tile_scheduler_metadata=schedule,
        softmax_scale=spec.softmax_scale,
        is_fp8_kvcache=True,
        indices=indices,
        attn_sink=sinks,
    )[0]
    return out[:, 0]


def _listed(pages: Tensor) -> Tensor:
    """View the pages as one list of tokens, [num_slots, 1, head_dim]."""
    try:
        return pages.view(-1, *pages.shape[2:])
    except RuntimeError:
        raise BatchError(
            "flashmla_sparse reads a bf16 cache as one list of evenly spaced tokens, got strides "
            f"{pages.stride()}: there are gaps between pages. Allocate them without padding, or use sparse_swa_mla."
        ) from None
