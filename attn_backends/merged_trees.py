"""Trees with kernels that do not support them: these attend to the prefix, and one of this library's adds the tree."""

from __future__ import annotations

from torch import Tensor

from attn_backends.base import Sinks
from attn_backends.kernels.tree_attention import TreeAttentionArguments, tree_attention
from attn_backends.kv_cache import KVCache
from builders import AttentionSpec, BatchMetadata


def merged_tree_reasons(spec: AttentionSpec) -> list[str]:
    """Return why a backend cannot serve this spec's trees by merging; empty if it can."""
    if spec.tree and spec.sliding_window is not None:
        return [
            "with trees sliding_window must be None: a window counts a token's depth in its tree, this kernel's its "
            f"index, got {spec.sliding_window}"
        ]
    return []


def merge_tree(
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    cache: KVCache,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    sinks: Sinks,
    *,
    lse_base_2: bool,
) -> Tensor:
    """Merge the attention over each request's tree into `out`, the attention over its prefix, in place; returns out.

    out    [num_tokens, num_q_heads, value_dim], contiguous: over the prefix only, without sinks
    lse    fp32 [num_tokens, num_q_heads]: logarithm, base 2 or natural, of the sum over the prefix of exp(score)
    query  [num_tokens, num_q_heads, head_dim], the one that attended to the prefix
    """
    assert metadata.tree_masks is not None
    arguments = TreeAttentionArguments(
        query=query,
        key_cache=cache.key,
        value_cache=cache.value,
        block_table=metadata.block_table,
        seq_lens=metadata.seq_lens,
        query_start_loc=metadata.query_start_loc,
        sinks=sinks,
        tree_masks=metadata.tree_masks,
        out=out,
        lse=lse,
        lse_base_2=lse_base_2,
        max_query_len=metadata.max_query_len,
        scale=spec.softmax_scale,
        soft_cap=spec.soft_cap,
        key_scale=cache.key_scale,
        value_scale=cache.value_scale,
    )
    tree_attention(*arguments)
    return out
