"""The draft backend of SGLang's FlashMLA, for dense latents in pages of 64 tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_backends import AttentionBackend, Sizes
from builders import HostLengths
from engine_kits.sglang.attention import attend, in_pages, used_pages, whole_rows
from engine_kits.sglang.builder import DraftAttention, PlannedSteps
from engine_kits.sglang.stand_in import STEPS
from engine_kits.subjects import DENSE_LATENT, backend_class

_PAGE = 64
_SCHEDULED = 132
"""SMs that FlashMLA's schedule is for."""


class FlashMLAMultiStepDraftBackend(PlannedSteps):
    host_lengths = HostLengths.NONE

    @staticmethod
    def make(runner: Any) -> Any:
        import sglang.srt.layers.attention.flashmla_backend as engine_module

        vars(engine_module).update(get_mla_metadata=_get_mla_metadata, flash_mla_with_kvcache=_flash_mla_with_kvcache)
        return engine_module.FlashMLAMultiStepDraftBackend(runner, topk=1, speculative_num_steps=STEPS)

    @staticmethod
    def kernel_inputs(metadata: Any, batch: Any, live: int) -> dict[str, Tensor]:
        # The lengths are not in the metadata: forward_decode uses the batch's.
        lengths = batch.seq_lens.int()
        return {
            "cache_seqlens": lengths[:live],
            "block_kv_indices": used_pages(whole_rows(metadata.block_kv_indices), lengths, live, _PAGE),
            "num_splits": metadata.num_splits[: live + 1],
        }

    @staticmethod
    def slots(metadata: Any, batch: Any) -> list[Tensor]:
        return in_pages(whole_rows(metadata.block_kv_indices), batch.seq_lens, _PAGE)


def backend() -> type[AttentionBackend]:
    pages = replace(DENSE_LATENT, page_sizes=Sizes(minimum=_PAGE, maximum=_PAGE))
    return backend_class(__name__, FlashMLAMultiStepDraftBackend, pages, DraftAttention)


def _get_mla_metadata(lengths: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Replaces FlashMLA's schedule and, like it, depends on every length."""
    splits = torch.cat([lengths.new_zeros(1), ((lengths + _PAGE - 1) // _PAGE).cumsum(0, dtype=torch.int32)])
    return lengths.new_zeros(_SCHEDULED, 8) + splits[-1], splits


def _flash_mla_with_kvcache(
    *,
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    head_dim_v: int,
    softmax_scale: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Replaces FlashMLA's own, for one query per row, which sees all tokens up to the length."""
    query, latents = q[:, 0], k_cache.flatten(0, 1)
    out = query.new_empty(*query.shape[:2], head_dim_v)
    rows = partial(in_pages, whole_rows(block_table), cache_seqlens, _PAGE)
    attend(out, query, latents, latents[..., :head_dim_v], rows, (block_table, cache_seqlens), softmax_scale)
    return out[:, None], None
