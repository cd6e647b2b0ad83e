"""Rounds of drafts in published shapes, at tiny sizes in the emulator."""

from dataclasses import replace

import pytest
import torch

from benchmarks.cases import draft_rounds
from benchmarks.cases.draft_rounds import random_draft_rows
from benchmarks.measure import DeviceRates
from benchmarks.random_drafts import RANDOM_DRAFTS
from benchmarks.rounds import weights_read
from benchmarks.rows import Bench
from tests.factories import CPU

TINY = {
    "vocab_size": 64,
    "draft_vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "n_routed_experts": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "o_lora_rank": 16,
    "o_groups": 2,
    "sliding_window": 8,
    "max_position_embeddings": 64,
}


def tiny(name, drafts=RANDOM_DRAFTS):
    case = drafts[name]
    config = {field: TINY.get(field, value) for field, value in case.config.items()}
    sizes = {"num_reqs": (1,), "num_speculative_tokens": (2,), "context": 12}
    return replace(case, config=config, backends=("torch_reference",), dtype=torch.float32, **sizes)


def weight_bytes(draft, num_reqs, *, whole_round=False):
    return sum(weights_read(draft, num_reqs, whole_round=whole_round).values())


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(draft_rounds, "RANDOM_DRAFTS", {name: tiny(name) for name in RANDOM_DRAFTS})


ALIKE = ("eagle-1024", "gpt-oss-20b-eagle3")
"""Of the kinds of two others, in other sizes."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in ALIKE)) for n in RANDOM_DRAFTS])
def test_every_draft_is_timed_in_every_strategy(small, name, monkeypatch):
    bench = Bench(CPU, DeviceRates(1000.0, 1.0))
    # The graphs for K 1 to 8 are no rounds, and take longer than all of them: see the next test.
    monkeypatch.setattr(draft_rounds, "_graph_set_rows", lambda *_: iter(()))
    rows = list(random_draft_rows(bench, name))
    assert not bench.missing
    assert {row["strategy"] for row in rows if row["case"] == f"{name}/round"} == {
        "full_loop",
        "device_loop",
        "per_step",
        "eager",
    }
    assert {row["temperature"] for row in rows if "temperature" in row} == {0.0, 1.0}
    narrow = [row for row in rows if row["case"] == f"{name}/fp8-round"]
    assert len(narrow) == (name in draft_rounds._IN_8_BITS)
    assert all(row["floor_counts"].endswith("weights of 8 bits as if they had 16") for row in narrow)


def test_step_bytes_exclude_embeddings_and_step_0_weights():
    case = tiny("qwen3-8b-eagle3")
    draft = case.make(CPU)
    skipped = draft.aux.fc.weight.numel()
    assert weight_bytes(draft, 1) == 4 * (sum(p.numel() for p in draft.parameters()) - skipped)


def test_step_bytes_grow_with_experts_used():
    draft = tiny("glm-4.7-flash-mtp").make(CPU)
    experts = 4 * sum(p.numel() for p in draft.layers[0].mlp.experts.parameters())
    assert weight_bytes(draft, 2) - weight_bytes(draft, 1) == pytest.approx(experts * (0.75 - 0.5))
