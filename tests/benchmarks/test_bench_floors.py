"""The minimum time of a round, the bytes that it moves and for a block the arithmetic, and where time goes."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from attn_backends import get
from benchmarks import measure
from benchmarks.measure import DeviceRates
from benchmarks.random_drafts import BLOCK_DRAFTS
from benchmarks.rounds import WHOLE, RoundConfig, TimedDraft, round_flops, time_round, weights_of, weights_read
from benchmarks.rows import Bench
from spec_decode.drafter import Strategy
from tests.benchmarks.test_bench_parallel import tiny_block
from tests.benchmarks.test_bench_random_drafts import tiny, weight_bytes
from tests.factories import CPU

REQS, K = 3, 2
BLOCK_ROUND = RoundConfig(get("torch_reference"), Strategy.FULL_LOOP, K, REQS)


def matrices_in(draft):
    """Elements of the weights that a round reads, by name, without vectors."""
    weights = {name: weight for name, weight in weights_of(draft).items() if weight.dim() > 1}
    return {name: weights[name].numel() for name in weights_read(draft, REQS, whole_round=True) if name in weights}


def test_peagle_round_counts_2k_rows_per_request():
    draft = TimedDraft.of(tiny_block("llama3-8b-peagle"), CPU)
    found = {name: flops for name, flops in round_flops(draft, BLOCK_ROUND, CPU).items() if flops}
    assert found == {
        name: 2 * numel * REQS * (K if name == "head.linear.weight" else 2 * K)
        for name, numel in matrices_in(draft.model).items()
    }


@pytest.mark.parametrize("name", BLOCK_DRAFTS)
def test_every_block_matrix_is_counted(name):
    draft = TimedDraft.of(tiny_block(name), CPU)
    flops = round_flops(draft, BLOCK_ROUND, CPU)
    assert {name for name, each in flops.items() if each} == {*matrices_in(draft.model)}


@pytest.mark.parametrize("flops_per_us, longer", [(1e12, "bytes"), (1.0, "flops")])
def test_block_floor_takes_longer_of_bytes_and_flops(flops_per_us, longer):
    draft = TimedDraft.of(tiny_block("llama3-8b-peagle"), CPU)
    [row] = time_round(Bench(CPU, DeviceRates(1000.0, flops_per_us)), draft, BLOCK_ROUND, {WHOLE: "round"})
    read, flops = weights_read(draft.model, REQS, whole_round=True), round_flops(draft, BLOCK_ROUND, CPU)
    # Norms are never multiplied as matrices: their bytes count.
    weights_us = [flops[name] if longer == "flops" and flops[name] else size / 1000 for name, size in read.items()]
    kv_us = REQS * draft.context * 2 * 64 * 4 * len(draft.layers) / 1000
    assert row["floor_us"] == pytest.approx(sum(weights_us) + kv_us, abs=1e-3)
    assert "or the products with it where these take longer" in row["floor_counts"]


def test_chain_floor_counts_only_bytes():
    draft = TimedDraft.of(tiny("eagle-1024"), CPU)
    [row] = time_round(Bench(CPU, DeviceRates(1000.0, 1.0)), draft, BLOCK_ROUND, {WHOLE: "round"})
    kv_bytes = REQS * draft.context * 2 * 64 * 4
    assert row["floor_us"] == pytest.approx(K * (weight_bytes(draft.model, REQS) + kv_bytes) / 1000, abs=1e-3)
    assert "products" not in row["floor_counts"]


def test_largest_kernels_are_summed_by_name(monkeypatch):
    times = [("gemm", 2.0, "CUDA"), ("aten::mm", 9.0, "CPU"), ("copy", 3.0, "CUDA"), ("gemm", 2.5, "CUDA")]
    events = [
        SimpleNamespace(
            name=name,
            device_type=SimpleNamespace(name=kind),
            time_range=SimpleNamespace(start=10 * at, end=10 * at + us),
        )
        for at, (name, us, kind) in enumerate(times)
    ]
    calls = []
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: nullcontext(SimpleNamespace(events=lambda: events)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronized"))
    found = measure.largest_kernels(lambda: calls.append("run"), 1)
    assert (found["gpu_us"], found["kernels"]) == (7.5, [{"kernel": "gemm", "us": 4.5, "launches": 2}])
    assert measure.kernels_in(lambda: None) == 3 and calls == ["run", *["synchronized"] * 2]


def test_device_work_can_overlap_and_wait():
    """A kernel that was launched early waits for the one before, and both run."""
    work = [measure._Work(*each) for each in ((17.0, 20.0, "b"), (0.0, 10.0, "a"), (5.0, 15.0, "b"), (6.0, 9.0, "c"))]
    assert measure._largest(work, 2) == {
        "gpu_us": 26.0,
        "busy_us": 18.0,
        "span_us": 20.0,
        "kernels": [{"kernel": "b", "us": 13.0, "launches": 2}, {"kernel": "a", "us": 10.0, "launches": 1}],
        "gaps": [{"us": 2.0, "before": "b", "after": "b"}],
    }
    assert measure._largest([], 2)["span_us"] == 0
