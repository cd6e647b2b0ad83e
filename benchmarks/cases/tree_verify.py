"""Attention of trees beside that of as many tokens in a row, after the same context, on every backend with trees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch

from attn_backends import AttentionBackend
from benchmarks.decode_fixture import shuffled_tables
from benchmarks.measure import Quantiles, time_kernels
from benchmarks.rows import Bench, BenchRow, serving, with_limits
from builders import AttentionBatch, AttentionKind, AttentionSpec, BatchBuffers
from spec_decode.tools.timing_limit import TimingLimit
from spec_decode.trees import DraftTree
from spec_decode.trees.kernels.ancestor_masks import ancestor_masks

_SPECS = (
    AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, page_size=16, dtype=torch.bfloat16, tree=True),
    AttentionSpec(
        num_q_heads=16, num_kv_heads=1, head_dim=576, value_dim=512, page_size=64, dtype=torch.bfloat16, tree=True,
        kind=AttentionKind.MLA,
    ),
)  # fmt: skip
_CONTEXT = 1024
_LIMIT = TimingLimit("chain_ratio", 1.15)
"""What a tree may take over as many tokens in a row."""


def tree_rows(bench: Bench) -> Iterator[BenchRow]:
    """Two rows for each size: tokens in a row, and a tree of three children a token."""
    for backend, spec in serving(bench, "tree-verify", _SPECS):
        for num_tokens, num_reqs in product((16, 32, 64), (1, 8)):
            at = f"{num_tokens} tokens, {num_reqs} requests"
            with bench.noting(f"tree-verify/{backend.name}", at=at):
                chain, tree = (_time(backend, spec, num_tokens, num_reqs, bench.device, own) for own in (False, True))
                row = {
                    "case": "tree-verify", "backend": backend.name, "spec": spec.describe(), "num_reqs": num_reqs,
                    "context": _CONTEXT, "num_tokens": num_tokens,
                }  # fmt: skip
                yield {**row, "tree": False, "gpu_us": chain}
                ratio = round(tree["p50"] / chain["p50"], 3)
                yield with_limits({**row, "tree": True, "gpu_us": tree, "chain_ratio": ratio}, _LIMIT)


def _time(
    backend: AttentionBackend, spec: AttentionSpec, num_tokens: int, num_reqs: int, device: torch.device, tree: bool
) -> Quantiles:
    """GPU microseconds of attention alone."""
    spec = spec if tree else replace(spec, tree=False)
    tables, num_pages = shuffled_tables(spec.page_size, num_reqs, _CONTEXT + num_tokens, device)
    cache = backend.allocate_kv(spec, num_pages, device)
    for part in (cache.key,) if cache.latent else (cache.key, cache.value):
        part.normal_()
    count = num_reqs * num_tokens
    buffers = BatchBuffers(tables, max_tokens=count)
    buffers.load([num_tokens] * num_reqs, [_CONTEXT + num_tokens] * num_reqs)
    batch = _batch(buffers, num_reqs, num_tokens, tree)
    builder = backend.builder(
        spec, device, max_reqs=num_reqs, max_tokens=count, max_seq_len=tables.max_seq_len
    )  # fmt: skip
    metadata = builder.build(batch)
    query = torch.randn(count, spec.num_q_heads, spec.head_dim, device=device).to(spec.dtype)
    return time_kernels(lambda: backend.forward(query, cache, metadata, spec=spec))


def _batch(buffers: BatchBuffers, num_reqs: int, num_tokens: int, tree: bool) -> AttentionBatch:
    count = num_reqs * num_tokens
    batch = buffers.view(0, num_reqs=num_reqs, num_tokens=count, max_query_len=num_tokens)
    if not tree:
        return batch
    shape = DraftTree(tuple(token // 3 for token in range(num_tokens - 1)))
    masks, depths = ancestor_masks(shape.rows(num_reqs, buffers.positions.device))
    buffers.tree_masks.copy_(masks.flatten())
    buffers.positions.copy_((_CONTEXT + depths).flatten())
    return buffers.tree_view(batch)
