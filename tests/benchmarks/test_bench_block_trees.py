"""Trees of blocks compared with chains: the shipped pair on a few tokens, and a published shape at a tiny size."""

from dataclasses import replace

import pytest
import torch

from benchmarks.cases import block_trees
from benchmarks.cases.block_trees import QWEN3_8B_ROUNDS, SHIPPED, block_tree_round_rows, block_tree_rows
from spec_decode.trees import DynamicTreeConfig
from tests.benchmarks.test_bench_parallel import tiny_block

TREES = (DynamicTreeConfig(width=4, num_tokens=7), DynamicTreeConfig(width=8, num_tokens=24))


@pytest.fixture
def two_trees(monkeypatch):
    monkeypatch.setattr(block_trees, "_TREES", TREES)


@pytest.mark.slow
def test_larger_tree_accepts_more_tokens(bench, two_trees):
    rows = list(block_tree_rows(bench, replace(SHIPPED, num_reqs=(2,), output=16, warm_up_tokens=2)))
    assert not bench.missing
    assert [(row["temperature"], row["tree"]) for row in rows] == [(t, tree) for t in (0, 1) for tree in (0, 1, 1)]
    # At a temperature tokens in a row are verified by another rule, whose text is another.
    assert rows[0]["accepted"] < rows[2]["accepted"]
    for chain, few, many in (rows[:3], rows[3:]):
        assert few["accepted"] < many["accepted"]
        assert "chain_ratio" not in chain and chain["draft"] == "the shipped pair's DFlash draft"
        assert few["draft"] == "the shipped pair's DFlash draft, 4x7"
        assert many["chain_ratio"] == pytest.approx(many["tokens_per_second"] / chain["tokens_per_second"], rel=0.01)


def test_published_shape_is_timed_as_chain_and_trees(bench, two_trees):
    sizes = {"num_layers": 6, "dtype": torch.float32, "backends": ("triton_paged",), "num_reqs": (2,), "prompt": 12}
    case = replace(QWEN3_8B_ROUNDS, draft=tiny_block("qwen3-8b-dflash"), **sizes, output=10, warm_up_tokens=4, gains={})
    rows = list(block_tree_round_rows(bench, case))
    assert not bench.missing and len(rows) == 3 and all(row["num_speculative_tokens"] == 7 for row in rows)
    assert [row["draft"].rpartition(", ")[2] for row in rows[1:]] == ["4x7", "8x24"]
    assert rows[0]["accepted"] == 0
