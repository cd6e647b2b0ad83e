"""vLLM's batch as ours: the same tensors, and bounds that hold for every replay."""

from __future__ import annotations

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from builders import AttentionBatch, check_batch
from builders.errors import require


def batch_of(common: CommonAttentionMetadata, *, max_seq_len: int) -> AttentionBatch:
    """max_seq_len: the longest that any batch of the engine may be, since a graph keeps what its capture was given.

    Raises BatchError for tensors that a kernel would misread, and for a batch that does not attend causally.
    """
    require(
        common.causal is True,
        f"attn-backends attends causally, got a batch with causal={common.causal!r}; later tokens would be left out. "
        "Use a backend of vLLM's own for it.",
    )
    rows, tokens, query_len = common.num_reqs, common.num_actual_tokens, common.max_query_len
    positions = common.positions
    batch = AttentionBatch(
        num_reqs=rows,
        num_tokens=tokens,
        max_query_len=query_len,
        max_seq_len=max_seq_len,
        uniform=tokens == rows * query_len,
        query_start_loc=common.query_start_loc,
        seq_lens=common.seq_lens,
        positions=torch.empty(0, dtype=torch.int64) if positions is None else positions[:tokens],
        block_table=common.block_table_tensor,
        slot_mapping=common.slot_mapping[:tokens],
    )
    check_batch(batch, common.seq_lens.device)
    return batch
