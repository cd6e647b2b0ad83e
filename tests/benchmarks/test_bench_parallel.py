"""Rounds of block drafts and attention of trees, at tiny sizes in the emulator."""

from dataclasses import replace

import pytest
import torch

from benchmarks.cases import draft_rounds, tree_verify
from benchmarks.cases.draft_rounds import block_draft_rows
from benchmarks.cases.throughput import LLAMA3_8B, block_throughput_rows
from benchmarks.cases.tree_verify import tree_rows
from benchmarks.random_drafts import BLOCK_DRAFTS, RANDOM_DRAFTS
from benchmarks.rows import Bench
from tests.benchmarks.test_bench_random_drafts import tiny
from tests.factories import CPU


def tiny_block(name):
    base = tiny(name, BLOCK_DRAFTS)
    masks = {key: 3 for key in ("ptd_token_id",) if key in base.config}
    if "dflash_config" in base.config:
        masks["dflash_config"] = base.config["dflash_config"] | {"mask_token_id": 3, "target_layer_ids": [*range(5)]}
    return replace(base, config={**base.config, **masks})


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(draft_rounds, "BLOCK_DRAFTS", {name: tiny_block(name) for name in BLOCK_DRAFTS})
    monkeypatch.setattr(draft_rounds, "RANDOM_DRAFTS", {name: tiny(name) for name in RANDOM_DRAFTS})


@pytest.mark.parametrize("name", BLOCK_DRAFTS)
def test_block_draft_is_timed_beside_step_draft(bench, small, name):
    rows = list(block_draft_rows(bench, name))
    assert not bench.missing
    assert [(row["case"], row.get("peer", False)) for row in rows] == [
        (f"{name}/round", False),
        (f"{name}/{draft_rounds._COMPARED_WITH[name]}/round", True),
    ]


def test_engines_of_both_draft_kinds_accept_alike(bench):
    sizes = {"num_layers": 6, "dtype": torch.float32, "backends": ("triton_paged",), "num_reqs": (2,), "prompt": 12}
    sizes |= {"output": 40, "warm_up_tokens": 8, "gains": {}, "kept": {3: 2.0}}
    case = replace(LLAMA3_8B, draft=tiny_block("qwen3-8b-dflash"), **sizes)
    steps, found = block_throughput_rows(bench, case, tiny("qwen3-8b-eagle3"))
    assert not bench.missing
    assert (steps["draft"], found["draft"]) == ("Qwen3-8B's EAGLE-3 draft", "Qwen3-8B's DFlash draft")
    assert all(row["accepted"] == pytest.approx(2.0, abs=0.3) for row in (steps, found))
    assert found["step_ratio"] == pytest.approx(found["per_user"] / steps["per_user"], rel=0.01)
    assert (steps["peer"], found["peer"]) == (True, False)


def test_trees_are_timed_beside_chains_on_every_backend(monkeypatch):
    def run_once(attend, caches):
        assert attend(caches[0]).isfinite().all()
        return {"p50": 2.0}

    monkeypatch.setattr(tree_verify, "time_in_turn", run_once)
    monkeypatch.setattr(tree_verify, "_CONTEXT", 20)
    small = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 128, "value_dim": 64, "scale": None}
    monkeypatch.setattr(tree_verify, "_SPECS", [replace(spec, **small) for spec in tree_verify._SPECS])
    rows = list(tree_rows(Bench(CPU, None)))
    assert {row["backend"] for row in rows} == {"torch_reference", "triton_paged", "triton_mla"}
    assert [row["tree"] for row in rows] == [False, True] * (len(rows) // 2)
    assert {(row["num_tokens"], row["num_reqs"]) for row in rows} == {(n, r) for n in (16, 32, 64) for r in (1, 8)}
    assert all(row["chain_ratio"] == 1.0 for row in rows if row["tree"])
