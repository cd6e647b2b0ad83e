"""How many programs a launch has, and which constants it is compiled for: nothing of it shows in a result."""

from dataclasses import replace

import pytest
import torch

from attn_backends.kernels import paged_attention, tree_attention
from attn_backends.kernels.paged_attention import SPLIT_TOKENS
from builders.kernels.triton_runtime import HAVE_TRITON
from tests.attn_backends.kernels.test_tree_attention import BATCHES, Trees
from tests.factories import make_spec

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="needs the package triton")
SPEC = make_spec(head_dim=64, num_q_heads=8, num_kv_heads=2)


class Launches:
    """In the place of a kernel: its grids and constants, and nothing runs."""

    def __init__(self):
        self.seen = []

    def __getitem__(self, grid):
        return lambda *_, **constants: self.seen.append((grid, constants))


@pytest.fixture
def launches(monkeypatch):
    found = Launches()
    monkeypatch.setattr(tree_attention, "_tree_attention_kernel", found)
    monkeypatch.setattr(paged_attention, "attention_kernel", found)
    monkeypatch.setattr(paged_attention, "merge_kernel", Launches())
    return found.seen


def test_trees_take_a_program_for_each_tile_of_a_groups_rows(launches):
    trees = Trees(SPEC, *BATCHES["ragged, as wide as a mask"])
    out = torch.zeros(len(trees.query), 8, 64)
    tables, lens, starts = trees.tensors
    tree_attention.TreeAttentionArguments(
        trees.query, trees.cache.key, trees.cache.value, tables, lens, starts, None, trees.masks, out,
        torch.zeros(len(trees.query), 8), False, 64, 0.125, None,
    ).launch()  # fmt: skip
    [(grid, constants)] = launches
    # The longest row's 64 tokens by 4 heads a group, in tiles of 64.
    assert constants["BLOCK_M"] == 64 and grid == (len(lens) * 4, 2)


@pytest.mark.parametrize(("invariant", "split_tokens"), [(False, 0), (True, SPLIT_TOKENS)])
def test_splits_have_a_fixed_size_where_bits_must_not_depend_on_the_batch_and_there_alone(
    launches, invariant, split_tokens
):
    trees = Trees(replace(SPEC, num_q_heads=4), [1, 1], [5, 130], [1, 1], None)
    tables, lens, starts = trees.tensors
    paged_attention.PagedAttentionArguments(
        trees.query, trees.cache.key, trees.cache.value, tables, lens, starts, None, None,
        max_query_len=1, max_seq_len=136, num_splits=2, scale=0.125, sliding_window=None, soft_cap=None, causal=True,
        batch_invariant=invariant,
    ).launch()  # fmt: skip
    [(_, constants)] = launches
    assert constants["SPLIT_BLOCKS"] * constants["BLOCK_N"] == split_tokens
