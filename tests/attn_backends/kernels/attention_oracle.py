"""Attention over the logical tokens of a paged cache, one query token at a time, in plain fp64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_backends import KVCache
from builders import AttentionSpec


def tokens_of(
    cache: KVCache, pages: torch.Tensor, length: int, spec: AttentionSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a request's keys fp64 [length, Hq, D] and values [length, Hq, Dv], per query head."""
    at = torch.arange(length)
    places = pages[at // spec.page_size].long(), at % spec.page_size
    scales = (1.0, 1.0) if cache.scales is None else (cache.scales.key[:, None], cache.scales.value[:, None])
    parts = (
        part.float()[places].double() * scale for part, scale in zip((cache.key, cache.value), scales, strict=True)
    )
    key, value = (part.repeat_interleave(spec.group_size, 1) for part in parts)
    return key, value


def scores_of(query: torch.Tensor, keys: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Return fp64 [N, Hq] for query [Hq, D] and keys [N, Hq, D]."""
    scores = torch.einsum("hd,nhd->nh", query.double(), keys) * spec.softmax_scale
    return spec.soft_cap * torch.tanh(scores / spec.soft_cap) if spec.soft_cap else scores


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: Sequence[int],
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return fp64 [Hq, Dv] for one query [Hq, D] over the tokens that it sees."""
    weights = scores_of(query, keys[seen], spec).exp()
    total = weights.sum(0) + (0.0 if sinks is None else sinks.double().exp())
    return torch.einsum("nh,nhd->hd", weights / total, values[seen])
