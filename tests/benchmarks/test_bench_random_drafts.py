"""Rounds of drafts in published shapes, at tiny sizes in the emulator."""

from dataclasses import replace

import pytest
import torch

from benchmarks.cases import draft_rounds
from benchmarks.cases.draft_rounds import random_draft_rows
from benchmarks.measure import DeviceRates
from benchmarks.random_drafts import RANDOM_DRAFTS
from benchmarks.rounds import RoundConfig, weights_read
from benchmarks.rows import Bench
from spec_decode.drafter import Strategy
from spec_decode.tools.timing_limit import verdict
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


def test_one_device_loop_is_held_against_the_full_loops_of_every_length(small):
    rows = [row for row in random_draft_rows(Bench(CPU, None), "eagle-1024") if "graphs" in row["case"]]
    assert [row["strategy"] for row in rows] == ["full_loop", "device_loop"]
    assert rows[1]["capture_ratio"] == pytest.approx(rows[1]["capture_seconds"] / rows[0]["capture_seconds"], rel=0.2)
    assert (
        rows[1]["bytes_ratio"] < 1
        and verdict(rows[1]["limits"])[0] == "capture_ratio <= 0.334 and bytes_ratio <= 0.334"
    )


def test_a_device_loop_is_charged_for_what_its_steps_take_over_the_unrolled_ones():
    def row(us):
        return {"case": "x/steps", "gpu_us": {"p50": us}}

    unrolled = {}
    draft_rounds._with_limits("x", RoundConfig(None, Strategy.FULL_LOOP, 7, 1), row(60.0), unrolled)
    found = draft_rounds._with_limits("x", RoundConfig(None, Strategy.DEVICE_LOOP, 7, 1), row(90.0), unrolled)
    assert found["loop_us"] == 5.0 and verdict(found["limits"])[1] is False


def test_a_step_reads_neither_embeddings_nor_what_step_0_alone_uses():
    case = tiny("qwen3-8b-eagle3")
    draft = case.make(CPU)
    skipped = draft.aux.fc.weight.numel()
    assert weight_bytes(draft, 1) == 4 * (sum(p.numel() for p in draft.parameters()) - skipped)


def test_a_step_reads_the_targets_head_where_the_draft_has_none():
    draft = tiny("eagle-1024").make(CPU)
    assert weight_bytes(draft, 1) == 4 * (sum(p.numel() for p in draft.parameters()) + 64 * 32)


@pytest.mark.parametrize("name", ["eagle-1024", "qwen3-8b-eagle3", "glm-4.7-flash-mtp"])
def test_weights_of_8_bits_count_as_those_of_16_that_they_are_compared_with(name):
    case = replace(tiny(name), dtype=torch.bfloat16)
    drafts = [replace(case, draft_weights=weights).make(CPU) for weights in (None, "fp8")]
    for whole_round in (False, True):
        assert len({weight_bytes(draft, 2, whole_round=whole_round) for draft in drafts}) == 1


def test_a_step_reads_as_many_experts_as_its_tokens_take():
    draft = tiny("glm-4.7-flash-mtp").make(CPU)
    experts = 4 * sum(p.numel() for p in draft.layers[0].mlp.experts.parameters())
    assert weight_bytes(draft, 2) - weight_bytes(draft, 1) == pytest.approx(experts * (0.75 - 0.5))
