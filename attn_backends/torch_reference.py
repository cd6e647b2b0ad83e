"""The specification: paged attention in plain torch, fp32 accumulation, any device."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from attn_backends.base import AttentionBackend, Sinks, check_forward_inputs
from attn_backends.capabilities import Capabilities, Feature, FusedWrite, Sizes
from attn_backends.fused_writes import FusedLatentWrite, FusedRopeWrite
from attn_backends.kernels.fp8_ds_mla import gather_and_dequantise
from attn_backends.kernels.softmax import softmax_with_sinks
from attn_backends.kv_cache import FP8_DS_MLA, KVCache
from builders import AttentionKind, AttentionSpec, ReferenceBuilder, ReferenceMetadata

_GATHERED_ELEMENTS = 1 << 24
"""Key elements gathered per chunk, so that a long prefill does not need all of tokens x context in memory."""


_BLOCK = 64
"""Tokens per block if outputs are batch invariant."""


class TorchReference(FusedLatentWrite, FusedRopeWrite, AttentionBackend):
    """Gathers each query token's keys by its metadata and computes softmax(q k^T) v in fp32."""

    name = "torch_reference"
    version = str(torch.__version__)
    contract_version = (1, 3)
    builder = ReferenceBuilder
    capabilities = Capabilities(
        devices=("cpu", "cuda"),
        dtypes=(torch.float32, torch.float16, torch.bfloat16),
        head_dims=Sizes(),
        page_sizes=Sizes(),
        features=frozenset(Feature),
        fused_writes=frozenset(FusedWrite),
        kinds=tuple(AttentionKind),
        kv_dtypes=(torch.float8_e4m3fn,),
        mixed_kv_dtypes=True,
        compute_capability=(7, 0),
    )

    def forward(
        self, query: Tensor, cache: KVCache, metadata: ReferenceMetadata, *, spec: AttentionSpec, sinks: Sinks = None
    ) -> Tensor:
        check_forward_inputs(query, cache, metadata, spec, sinks)
        # torch's sums depend on the shape: to be batch invariant, each token is attended separately, block by block.
        unit = _BLOCK if spec.batch_invariant else spec.page_size
        context = -(-metadata.max_seq_len // unit) * unit
        chunk = max(1, _GATHERED_ELEMENTS // (context * spec.num_kv_heads * spec.head_dim))
        chunk = 1 if spec.batch_invariant else chunk
        chunks = [slice(start, start + chunk) for start in range(0, metadata.num_tokens, chunk)]
        parts = [_attend(query[tokens], cache, metadata, tokens, spec, sinks, context) for tokens in chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(
    query: Tensor,
    cache: KVCache,
    metadata: ReferenceMetadata,
    part: slice,
    spec: AttentionSpec,
    sinks: Sinks,
    context: int,
) -> Tensor:
    """query [T, Hq, D] holds the tokens of `part`. Pages outside a token's kv_start .. kv_end - 1 are not read.

    context: the number of positions considered, from 0.
    """
    tokens, size = query.shape[0], spec.page_size
    block = _BLOCK if spec.batch_invariant else context
    position = torch.arange(context, device=query.device)
    seen = (position >= metadata.kv_start[part, None]) & (position < metadata.kv_end[part, None])
    if metadata.tree_masks is not None:
        seen &= _seen_in_trees(metadata, metadata.tree_masks[part], part, position)
    table = metadata.block_table[metadata.token_to_req[part]].long()
    page = table[:, (position // size).clamp(max=table.shape[1] - 1)]
    slot = torch.where(seen, page * size + position % size, 0)
    key = _gather(cache, cache.key, slot, cache.key_scale)
    # Scores of masked keys are filled below. A NaN value would survive a weight of 0.
    value = _gather(cache, cache.value, slot, cache.value_scale).masked_fill_(~seen[..., None, None], 0.0)
    grouped = query.float().view(tokens, spec.num_kv_heads, spec.group_size, spec.head_dim)
    # With this operand order no key is copied across its dims: half the time of einsum on a CPU.
    scores = torch.cat([(keys.transpose(1, 2) @ grouped.mT).mT for keys in key.split(block, 1)], -1)
    scores = scores * spec.softmax_scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    by_head = None if sinks is None else sinks.view(spec.num_kv_heads, spec.group_size, 1)
    weights = softmax_with_sinks(scores, by_head, block)
    parts = zip(weights.split(block, -1), value.split(block, 1), strict=True)
    out: Tensor = reduce(torch.add, [share @ values.transpose(1, 2) for share, values in parts])
    return out.reshape(tokens, spec.num_q_heads, spec.out_dim).to(query.dtype)


def _seen_in_trees(metadata: ReferenceMetadata, masks: Tensor, part: slice, position: Tensor) -> Tensor:
    """Bool [T, L]: whether each token of `part` sees each position, as far as its tree mask decides that."""
    row = metadata.token_to_req[part]
    starts = metadata.query_start_loc
    cached = metadata.seq_lens[row] - (starts[row + 1] - starts[row])
    query_token = position - cached[:, None]
    return (query_token < 0) | (masks[:, None] >> query_token.clamp(0, 63) & 1).bool()


def _gather(cache: KVCache, part: Tensor, slot: Tensor, scale: Tensor | None) -> Tensor:
    """Return keys or values [pages, size, H, D] at slot [T, L] as fp32 [T, L, H, D], always a copy, times their
    scale."""
    size = part.shape[1]
    if cache.layout is FP8_DS_MLA:
        return gather_and_dequantise(cache.latents, slot.flatten(), size).view(*slot.shape, 1, -1).float()
    if part.is_contiguous():
        # A single index copies whole rows: on a CPU several times as fast as two, which copy by element.
        found = part.flatten(0, 1).index_select(0, slot.flatten()).view(*slot.shape, *part.shape[2:]).float()
    else:
        found = part[slot // size, slot % size].float()
    return found if scale is None else found * scale[:, None]
