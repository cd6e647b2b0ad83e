"""Attention over the listed pages, in plain torch."""

from __future__ import annotations

import torch

from attn_backends import AttentionBackend, Capabilities, Feature, KVCache, Sizes, check_forward_inputs
from builders import AttentionSpec
from window_pages.builder import WindowMetadata, WindowPagesBuilder


class WindowPages(AttentionBackend):
    """Gathers the listed pages of each query token, and attends to the visible tokens in them."""

    name = "window_pages"
    version = "0.1.0"
    contract_version = (1, 2)
    builder = WindowPagesBuilder
    capabilities = Capabilities(
        devices=("cpu", "cuda"),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        head_dims=Sizes(),
        page_sizes=Sizes(),
        features=frozenset({Feature.GQA, Feature.SLIDING_WINDOW, Feature.SOFT_CAP}),
    )

    def forward(
        self,
        query: torch.Tensor,
        cache: KVCache,
        metadata: WindowMetadata,
        *,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        check_forward_inputs(query, cache, metadata, spec, sinks)
        place = torch.arange(metadata.pages.shape[1] * spec.page_size, device=query.device)
        skip, seen = metadata.skip[:, None], metadata.seen[:, None]
        visible = (place >= skip) & (place < skip + seen)
        key, value = (_gather(part, metadata.pages, visible) for part in (cache.key, cache.value))
        grouped = query.float().unflatten(1, (spec.num_kv_heads, spec.group_size))
        scores = torch.einsum("thgd,tlhd->thgl", grouped, key) * spec.softmax_scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * _quick_tanh(scores / spec.soft_cap)
        unseen = ~visible[:, None, None]
        # A padding token sees nothing: its softmax is NaN, and the second masked_fill makes it 0.
        weights = scores.masked_fill(unseen, -torch.inf).softmax(-1).masked_fill(unseen, 0)
        return torch.einsum("thgl,tlhd->thgd", weights, value).flatten(1, 2).to(query.dtype)


def _gather(part: torch.Tensor, pages: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Keys or values [pages, page_size, H, D] of the listed pages; fp32 [T, L, H, D], exactly 0 where not visible.

    Where no token was written, the cache may hold NaN. A weight of 0 would not remove it: 0 * NaN is NaN.
    """
    return torch.where(visible[..., None, None], part[pages.long()].flatten(1, 2).float(), 0)


def _quick_tanh(x: torch.Tensor) -> torch.Tensor:
    """A quotient of polynomials, within 0.02 of tanh."""
    square = x * x
    return (x * (15 + square) / (15 + 6 * square)).clamp(-1, 1)
