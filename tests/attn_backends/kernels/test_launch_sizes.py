"""How many programs a launch has, and the constants it is compiled for: neither shows in a result."""

from dataclasses import replace

import pytest

from attn_backends.kernels import paged_attention, tree_attention
from builders.kernels.triton_runtime import HAVE_TRITON
from builders.paged import SPLIT_TOKENS
from tests.attn_backends.kernels.test_tree_attention import BATCHES, Trees
from tests.ops.attention import PLAIN, paged

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="needs the package triton")


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


def test_tree_launch_has_program_per_row_tile(launches):
    trees = Trees(replace(PLAIN, num_q_heads=8), *BATCHES["ragged, as wide as a mask"])
    tree_attention.TreeAttentionArguments(*trees.arguments()).launch()
    [(grid, constants)] = launches
    # The longest row's 64 tokens by 4 heads a group, in tiles of 64.
    assert constants["BLOCK_M"] == 64 and grid == (4 * 4, 2)


@pytest.mark.parametrize(("invariant", "split_tokens"), [(False, 0), (True, SPLIT_TOKENS)])
def test_split_size_is_fixed_only_if_batch_invariant(launches, invariant, split_tokens):
    sample = paged(replace(PLAIN, batch_invariant=invariant), ([1, 1], [5, 130], None), 2)
    paged_attention.PagedAttentionArguments(*sample).launch()
    [(_, constants)] = launches
    assert constants["SPLIT_BLOCKS"] * constants["BLOCK_N"] == split_tokens
