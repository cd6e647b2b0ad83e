"""Tree attention next to that of a chain with as many tokens, after the same context, on every backend with trees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from attn_backends import AttentionBackend
from benchmarks.decode_fixture import DecodeFixture
from benchmarks.measure import Quantiles, time_in_turn
from benchmarks.rows import Bench, BenchRow, serving, with_limits
from spec_decode.tools.specs import GQA, MLA
from spec_decode.tools.timing_limit import TimingLimit
from spec_decode.trees import DraftTree
from spec_decode.trees.kernels.ancestor_masks import ancestor_masks

_SPECS = tuple(replace(spec, tree=True) for spec in (GQA, MLA))
_CONTEXT = 1024
_LIMIT = TimingLimit("chain_ratio", 1.15)
"""Maximum ratio of a tree's time to a chain's."""


def tree_rows(bench: Bench) -> Iterator[BenchRow]:
    """Yield two rows for each size: a chain, and a tree with three children per token."""
    for backend, spec in serving(bench, "tree-verify", _SPECS):
        for num_tokens, num_reqs in product((16, 32, 64), (1, 8)):
            at = f"{num_tokens} tokens, {num_reqs} requests"
            with bench.noting(f"tree-verify/{backend.name}", at=at):
                length = _CONTEXT + num_tokens
                fixtures = [
                    DecodeFixture(replace(spec, tree=tree), num_reqs, length, bench.device, tokens=num_tokens)
                    for tree in (False, True)
                ]
                chain, tree = (_time(fixture, backend) for fixture in fixtures)
                labels = fixtures[1].labels("tree-verify", backend.name)
                row = {**labels, "context": _CONTEXT}
                yield {**row, "tree": False, "gpu_us": chain}
                ratio = round(tree["p50"] / chain["p50"], 3)
                yield with_limits({**row, "tree": True, "gpu_us": tree, "chain_ratio": ratio}, _LIMIT)


def _time(fixture: DecodeFixture, backend: AttentionBackend) -> Quantiles:
    """Return GPU microseconds of attention only."""
    if fixture.spec.tree:
        _make_tree(fixture)
    return time_in_turn(fixture.attention_by(backend), fixture.caches(backend, cold=False))


def _make_tree(fixture: DecodeFixture) -> None:
    """Replace the chain by a tree with three children per token."""
    buffers, num_tokens = fixture.buffers, fixture.batch.max_query_len
    shape = DraftTree(tuple(token // 3 for token in range(num_tokens - 1)))
    masks, depths = ancestor_masks(shape.rows(fixture.num_reqs, fixture.device))
    buffers.tree_masks.copy_(masks.flatten())
    buffers.positions.copy_((fixture.context - num_tokens + depths).flatten())
    fixture.batch = buffers.tree_view(fixture.batch)
