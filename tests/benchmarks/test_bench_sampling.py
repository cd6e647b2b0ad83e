from collections import Counter
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

import benchmarks as benches
from benchmarks.cases.sampling import COMPARISONS, comparison_rows, sampling_rows, threshold
from benchmarks.sampling_methods import KINDS, SamplingFixture, TimedCall, our_logits
from tests.factories import CPU
from tests.stand_in_modules import install_module

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
NO_PEER = pytest.mark.skipif(
    any(map(find_spec, ("flashinfer", "vllm"))), reason="needs a machine without flashinfer and vLLM"
)
INF = float("inf")
BY_CASE = {comparison.case: comparison for comparison in COMPARISONS}


def fixture_of(params, kind="flat", rows=3):
    return SamplingFixture.make(kind, rows, 512, params, CPU)


@pytest.fixture
def peers(flashinfer, monkeypatch):
    """FlashInfer's stand-in, and one for vLLM's module of Qrita's kernels, as its docstrings define it."""

    def apply_top_k_top_p_triton(logits, k, p):
        assert k is None or (k.dtype == torch.int32 and bool((k > 0).all()))
        assert p is None or (p.dtype == torch.float32 and bool((p < 1).all()))
        top_k, top_p = (0 if k is None else int(k[0])), (1.0 if p is None else float(p[0]))
        exact = logits.double()
        return logits.masked_fill_(exact < threshold(exact, top_k, top_p), -INF)

    module = "vllm.v1.sample.ops.topk_topp_triton"
    install_module(monkeypatch, module, apply_top_k_top_p_triton=apply_top_k_top_p_triton)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", BY_CASE)
def test_our_result_is_right_and_repeats(case, kind):
    comparison = BY_CASE[case]
    fixture = fixture_of(comparison.params, kind)
    timed = comparison.ours[1](fixture)
    first = timed.call().clone()
    (timed.prepare or (lambda: None))()
    assert comparison.check(fixture, first) is None and torch.equal(timed.call(), first)


def test_wrong_result_of_ours_leaves_peer_rows(bench):
    wrong = ("ours", lambda fixture: TimedCall(lambda: fixture.logits))
    right = {"right": our_logits}
    [row] = comparison_rows(bench, replace(BY_CASE["top-k"], ours=wrong, peers=right), "flat", 3, 512)
    assert (row["backend"], row["peer"]) == ("right", True) and bench.missing


@NO_CUDA
@NO_PEER
def test_sampling_on_cpu_runs_ours_and_notes_peers():
    timings = benches.run(device=CPU, cases=["sampling"])
    ours = {(row["case"], row["num_reqs"]) for row in timings.rows}
    assert ours == {(f"sampling/{case}", rows) for case in BY_CASE for rows in (1, 4)}
    assert all(row["gpu_us"] is None and row["wall_us"]["p50"] > 0 for row in timings.rows)
    assert Counter("vllm" if "vllm" in note else "flashinfer" for note in timings.missing) == {
        "flashinfer": 9,
        "vllm": 3,
    }
    assert not timings.stopped


@NO_CUDA
def test_every_comparison_has_rows_per_shape_and_kind(bench, peers):
    rows = [row for row in sampling_rows(bench) if "peer_ratio" in row]
    assert len(rows) == sum(2 * len(comparison.kinds) for comparison in COMPARISONS) and not bench.missing
