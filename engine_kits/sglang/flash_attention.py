"""The draft backend of SGLang's FlashAttention, version 3 as on Hopper."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_backends import AttentionBackend
from builders import HostLengths
from engine_kits.sglang.attention import attend, in_pages, used_pages
from engine_kits.sglang.builder import DraftAttention, PlannedSteps
from engine_kits.sglang.stand_in import STEPS
from engine_kits.subjects import HEADS, backend_class


class FlashAttentionMultiStepBackend(PlannedSteps):
    host_lengths = HostLengths.NONE

    @staticmethod
    def make(runner: Any) -> Any:
        import sglang.srt.layers.attention.flashattention_backend as engine_module

        vars(engine_module)["flash_attn_with_kvcache"] = _flash_attn_with_kvcache
        return engine_module.FlashAttentionMultiStepBackend(runner, topk=1, speculative_num_steps=STEPS)

    @staticmethod
    def kernel_inputs(metadata: Any, batch: Any, live: int) -> dict[str, Tensor]:
        lengths = metadata.cache_seqlens_int32
        return {
            "cache_seqlens_int32": lengths[:live],
            "cu_seqlens_k": metadata.cu_seqlens_k[: live + 1],
            "page_table": used_pages(metadata.page_table, lengths, live, batch.page_size),
        }

    @staticmethod
    def slots(metadata: Any, batch: Any) -> list[Tensor]:
        return in_pages(metadata.page_table, metadata.cache_seqlens_int32, batch.page_size, batch.window)


def backend() -> type[AttentionBackend]:
    return backend_class(__name__, FlashAttentionMultiStepBackend, HEADS, DraftAttention)


def _flash_attn_with_kvcache(
    *,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    softmax_scale: float,
    window_size: tuple[int, int],
    **_: Any,
) -> Tensor:
    """Replaces FlashAttention's own. window_size: tokens before the query's own; -1 for all."""
    out = torch.empty_like(q)
    key, value = (cache.flatten(0, 1) for cache in (k_cache, v_cache))
    rows = partial(in_pages, page_table, cache_seqlens, k_cache.shape[1], window_size[0] + 1)
    attend(out, q, key, value, rows, (page_table, cache_seqlens), softmax_scale)
    return out
