"""What drafts are compared with: their own steps compiled by torch, and torch's own products."""

from dataclasses import replace

import pytest
import torch

from attn_backends import get
from benchmarks import measure
from benchmarks.cases import compiled_steps, products
from benchmarks.cases.compiled_steps import (
    ContiguousAttention,
    in_plain_torch,
    model_step,
    step_inputs,
)
from benchmarks.measure import DeviceRates
from benchmarks.random_drafts import PUBLISHED_DRAFTS
from benchmarks.rounds import RoundConfig, TimedDraft
from benchmarks.rows import Bench
from builders import AttentionKind
from spec_decode.drafter import Strategy
from spec_decode.model_api import AttentionInputs
from spec_decode.tools.timing_limit import verdict
from tests.benchmarks.test_bench_random_drafts import tiny
from tests.factories import CPU, make_spec

KINDS = ("llama3-8b-eagle", "qwen3-8b-eagle3", "kimi-k2-eagle3", "glm-4.7-flash-mtp", "deepseek-v4-mtp")
LATENT = {"kind": AttentionKind.MLA, "num_kv_heads": 1, "head_dim": 48, "value_dim": 32}


def tiny_draft(name):
    return TimedDraft.of(tiny(name), CPU)


@pytest.mark.parametrize(
    "shape",
    [
        {"head_dim": 64},
        {"head_dim": 64, "sliding_window": 5},
        {"head_dim": 64, "soft_cap": 2.0},
        {"head_dim": 64, "sinks": True},
        {"head_dim": 320},
        {**LATENT, "sliding_window": 5, "sinks": True},
        LATENT,
    ],
    ids=["torch's own", "a window", "a soft cap", "sinks", "wide heads", "a window of latents with sinks", "latents"],
)
def test_dense_attention_matches_fp64_reference(shape):
    spec, rows, context = make_spec(**{"num_q_heads": 4, "num_kv_heads": 2, **shape}), 3, 9
    attention = ContiguousAttention(spec, (0,), num_reqs=rows, context=context, device=CPU)
    query = torch.randn(rows, spec.num_q_heads, spec.head_dim)
    key = torch.randn(rows, spec.num_kv_heads, spec.head_dim)
    latent = spec.kind is AttentionKind.MLA
    value = key[..., : spec.out_dim] if latent else torch.randn(rows, spec.num_kv_heads, spec.out_dim)
    sinks = torch.randn(spec.num_q_heads) if spec.sinks else None

    out = attention(AttentionInputs(0, query, key, value, sinks=sinks))

    keys = torch.cat([attention.keys[0][:, :context], key[:, None]], 1).double()
    values = keys[..., : spec.out_dim] if latent else torch.cat([attention.values[0][:, :context], value[:, None]], 1)
    first = max(0, context + 1 - (spec.sliding_window or context + 1))
    for row in range(rows):
        for head in range(spec.num_q_heads):
            of_group = head // (spec.num_q_heads // spec.num_kv_heads)
            scores = keys[row, first:, of_group] @ query[row, head].double() * spec.softmax_scale
            if spec.soft_cap:
                scores = spec.soft_cap * (scores / spec.soft_cap).tanh()
            if sinks is not None:
                scores = torch.cat([scores, sinks[head, None].double()])
            weights = scores.softmax(0)[: context + 1 - first]
            expected = weights @ values[row, first:, of_group].double()
            torch.testing.assert_close(out[row, head].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "num_reqs"), [(KINDS[0], 1), *((name, 5) for name in KINDS)])
def test_plain_torch_step_matches_model(name, num_reqs):
    draft = tiny_draft(name)
    step, inputs = model_step(draft, num_reqs, CPU), step_inputs(draft, num_reqs, CPU)

    module = in_plain_torch(step, inputs)

    ops = {node.target for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    assert {op.namespace for op in ops} == {"aten"}
    other = [each.roll(1, 0) + (0 if each.is_floating_point() else 1) for each in inputs]
    for given in (inputs, other):
        for found, expected in zip(module(*given), step(*given), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_draft_has_own_row_and_compiled_row(monkeypatch):
    monkeypatch.setattr(compiled_steps, "_compile", lambda module: module)
    run = RoundConfig(get("torch_reference"), Strategy.FULL_LOOP, 3, 1)

    ours, theirs = compiled_steps.comparison_rows(Bench(CPU, None), "x-compiled", tiny_draft("llama3-8b-eagle"), run)

    assert (ours["backend"], ours.get("peer", False), ours["strategy"]) == ("torch_reference", False, "full_loop")
    assert (theirs["backend"], theirs["peer"], theirs["strategy"]) == ("torch.compile", True, "per_step")
    assert ours["peer_ratio"] == pytest.approx(ours["wall_us"]["p50"] / theirs["wall_us"]["p50"], abs=1e-3)
    assert verdict(ours["limits"]) == ("peer_ratio <= 1", ours["peer_ratio"] <= 1)


def test_each_product_has_rows_for_us_and_torch(monkeypatch):
    medians = iter([{"p50": float(n)} for n in range(1, 100)])

    def time_kernels(launch, *, calls):
        launch()
        return next(medians)

    monkeypatch.setattr(measure, "time_kernels", time_kernels)
    monkeypatch.setattr(products, "PUBLISHED_DRAFTS", {KINDS[0]: replace(tiny(KINDS[0]), dtype=torch.bfloat16)})
    monkeypatch.setattr(products, "COLD_BYTES", 0)
    monkeypatch.setattr(products, "_SMALLEST", 32 * 64)
    monkeypatch.setattr(products, "_ROWS", (1, 8, 500))
    bench = Bench(CPU, DeviceRates(1000.0, 1.0))

    rows = list(products.product_rows(bench))

    assert not bench.missing and PUBLISHED_DRAFTS
    # The head is of the shape of the first weight, turned; the others are too small but for two.
    assert list(dict.fromkeys(row["spec"].partition(": ")[2] for row in rows)) == [
        "64 to 32", "32 to 384", "256 to 32", "32 to 96", "32 to 64",
    ]  # fmt: skip
    ours, theirs = rows[:2]
    assert (ours["peer_ratio"], ours["floor_us"], theirs["backend"], theirs["peer"]) == (0.5, 4.096, "torch", True)
    # So many rows as 500 are torch's to multiply.
    assert [row["num_reqs"] for row in rows] == [1, 1, 8, 8] * 5
