"""vLLM's batch as an AttentionBatch: the same tensors, and bounds that hold for every replay."""

from __future__ import annotations

import torch

from attn_backends.engines.vllm.compat import CommonAttentionMetadata
from builders import AttentionBatch, check_batch
from builders.errors import require


def check_causality(common: CommonAttentionMetadata, *, serves_blocks: bool, sliding_window: int | None) -> None:
    """Raise BatchError for a batch whose later tokens a kernel would omit, or would show although they are hidden.

    serves_blocks   whether the kernels have non-causal attention, which a block of draft tokens needs
    sliding_window  of the layers. In a block, vLLM's window is symmetric and this library's does not limit later
                    tokens: the same as long as the block is no longer than the window
    """
    causal, block = common.causal, common.max_query_len
    require(
        isinstance(causal, bool),
        "attn-backends needs one causal flag for all requests of a batch, got a tensor with one each; some outputs "
        "would be wrong. Use FLASH_ATTN for this model.",
    )
    require(
        bool(causal) or serves_blocks,
        "this backend is causal only, got a batch with causal=False; later tokens would be ignored. Choose FLASH_ATTN, "
        "or another non-causal backend, for the draft.",
    )
    require(
        bool(causal) or sliding_window is None or block <= sliding_window,
        f"a block of draft tokens must be no longer than the sliding window of {sliding_window}, got {block}; queries "
        "would see beyond the window. Draft fewer tokens, or choose FLASH_ATTN for the draft.",
    )


def batch_of(common: CommonAttentionMetadata, *, max_seq_len: int) -> AttentionBatch:
    """Convert vLLM's batch. max_seq_len: the maximum over the engine's batches, because a graph keeps it as captured.

    Raises BatchError for tensors that a kernel would misread.
    """
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
