"""Attention over whole sequences, without a paged cache.

Legend: B sequences, L positions, H hidden, D head dim, A blocks a sequence.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from attn_backends.kernels.rope import Rope, apply_rope
from spec_decode.model_api import Attention, AttentionInputs
from spec_decode.models import LlamaTarget


def positions_of(tokens: torch.Tensor) -> torch.Tensor:
    """Return positions [B * L] for tokens [B, L]."""
    return torch.arange(tokens.shape[1], device=tokens.device).repeat(tokens.shape[0])


def run_target(target: LlamaTarget, tokens: torch.Tensor) -> torch.Tensor:
    """Return hidden states [B, L, H] for tokens [B, L]."""
    attention = causal_attention(tokens.shape[0], target.config.sliding_window)
    hidden: torch.Tensor = target(tokens.flatten(), positions_of(tokens), attention).hidden
    return hidden.view(*tokens.shape, -1)


def causal_attention(batch: int, window: int | None = None) -> Attention:
    """Return attention over whole sequences. window: the positions a query sees, including itself; None: all before
    it."""

    def attention(inputs: AttentionInputs) -> torch.Tensor:
        query, key, value = inputs.normed_and_rotated()
        query, key, value = (_heads_first(batch, x) for x in (query, key, value))
        if window is None and inputs.sinks is None:
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        else:
            lag = _lag(query.shape[2], query.device)
            out = _masked_attention(query, key, value, (lag >= 0) & _within(lag, window), inputs.sinks)
        return out.transpose(1, 2).flatten(0, 1)

    return attention


def unrolled_attention(tokens: torch.Tensor, window: int | None = None) -> Attention:
    """Return attention for a draft that is called once per step over the same tokens [B, L].

    The query of step k sees what it would see at inference: keys made from the target's states up to k positions back,
    then one key of each later step, its own last, all limited to its window.
    """
    lag = _lag(tokens.shape[1], tokens.device)
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []

    def attention(inputs: AttentionInputs) -> torch.Tensor:
        step = len(keys)
        query, key, value = inputs.normed_and_rotated()
        keys.append(_heads_first(tokens.shape[0], key))
        values.append(_heads_first(tokens.shape[0], value))
        blocks = [lag >= step, *(lag == step - own for own in range(1, step + 1))]
        seen = torch.cat([block & _within(lag, window) for block in blocks], 1)
        query = _heads_first(tokens.shape[0], query)
        out = _masked_attention(query, torch.cat(keys, 2), torch.cat(values, 2), seen, inputs.sinks)
        return out.transpose(1, 2).flatten(0, 1)

    return attention


class BlockAttention:
    """Attention of a draft's blocks in whole sequences, as at inference: each block sees the stored context before it
    and all of itself, but no other block."""

    def __init__(self, starts: torch.Tensor, lens: torch.Tensor, *, query_len: int, context: int) -> None:
        """starts: int64 [B, A], each block's first position. lens: int64 [B, A], the block's tokens after the first;
        the rest of `query_len` is padding. context: the number L of stored positions."""
        batch, count = starts.shape
        place = torch.arange(query_len, device=starts.device)
        before = torch.arange(context, device=starts.device) < starts[..., None]
        own = torch.eye(count, dtype=torch.bool, device=starts.device)[:, :, None]
        inside = own & (place <= lens[:, None, :, None])
        seen = torch.cat([before, inside.flatten(2)], -1)
        self._batch, self._seen = batch, seen.repeat_interleave(query_len, 1)[:, None]
        self._context: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor, rope: Rope) -> None:
        """See `ContextAttention`."""
        self._context[layer] = apply_rope(key, rope), value

    def __call__(self, inputs: AttentionInputs) -> torch.Tensor:
        """See `Attention`."""
        query, *block = inputs.normed_and_rotated()
        key, value = (
            torch.cat([_heads_first(self._batch, x) for x in both], 2)
            for both in zip(self._context[inputs.layer], block, strict=True)
        )
        out = _masked_attention(_heads_first(self._batch, query), key, value, self._seen, inputs.sinks)
        return out.transpose(1, 2).flatten(0, 1)


def _masked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attend from query [B, Hq, L, D] to key [B, Hkv, M, D] and value under the mask `seen`, [L, M] or [B, 1, L, M],
    with a sink per head.

    Sinks use plain torch: no fused kernel has a gradient for them, and none is fast for a latent's many dims.
    """
    groups = query.shape[1] // key.shape[1]
    if sinks is None:
        # Repeated because the fused kernel with a mask does not support grouped heads.
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, seen)
    query = query.unflatten(1, (-1, groups)) * query.shape[-1] ** -0.5
    scores = torch.einsum("bhgld,bhmd->bhglm", query, key).masked_fill(~seen, -torch.inf)
    column = sinks.view(-1, groups, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return torch.einsum("bhglm,bhme->bhgle", weights, value).flatten(1, 2)


def _lag(length: int, device: torch.device) -> torch.Tensor:
    """Return how many positions each key is before each query, int64 [L, L]."""
    at = torch.arange(length, device=device)
    return at[:, None] - at


def _within(lag: torch.Tensor, window: int | None) -> torch.Tensor:
    return lag < (lag.shape[0] if window is None else window)


def _heads_first(batch: int, flat: torch.Tensor) -> torch.Tensor:
    return flat.view(batch, -1, *flat.shape[1:]).transpose(1, 2)
