from collections import Counter
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

import benchmarks as benches
from benchmarks.cases import sampling
from benchmarks.cases.sampling import COMPARISONS, comparison_rows, sampling_rows, threshold
from benchmarks.rows import Bench
from benchmarks.sampling_methods import KINDS, SamplingFixture, TimedCall, our_logits, our_target
from spec_decode.sampling import SamplingParams
from tests.factories import CPU
from tests.stand_in_modules import install_module

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
NO_PEER = pytest.mark.skipif(
    any(map(find_spec, ("flashinfer", "vllm"))), reason="needs a machine without flashinfer and vLLM"
)
INF = float("inf")
BOTH = SamplingParams(temperature=1.0, top_k=50, top_p=0.9)
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


def compared(bench, case, rows=3):
    return list(comparison_rows(bench, BY_CASE[case], "flat", rows, 512))


ROW = [1.0, 4.0, 3.0, 0.0, 2.0]  # shares 0.03, 0.64, 0.23, 0.01, 0.09


@pytest.mark.parametrize(
    ("top_k", "top_p", "least"),
    [(0, 1.0, 0.0), (2, 1.0, 3.0), (9, 1.0, 0.0), (0, 0.5, 4.0), (0, 0.7, 3.0), (0, 0.99999, 0.0), (2, 0.72, 4.0)],
)
def test_the_oracle_keeps_the_tokens_of_the_restriction(top_k, top_p, least):
    assert threshold(torch.tensor([ROW]).double(), top_k, top_p).item() == least


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", BY_CASE)
def test_what_we_produce_is_right_and_stays_so_when_it_is_made_again(case, kind):
    comparison = BY_CASE[case]
    fixture = fixture_of(comparison.params, kind)
    timed = comparison.ours[1](fixture)
    first = timed.call().clone()
    (timed.prepare or (lambda: None))()
    assert comparison.check(fixture, first) is None and torch.equal(timed.call(), first)


def test_peaked_logits_have_a_small_nucleus_and_flat_ones_a_large_one():
    sizes = {}
    for kind in KINDS:
        exact = SamplingFixture.make(kind, 1, 32_000, BOTH, CPU).logits.double()
        sizes[kind] = int((exact >= threshold(exact, 0, 0.9)).sum())
    assert sizes["peaked"] < 100 and sizes["flat"] > 1000


def restricted(fixture):
    return our_logits(fixture).call()


def softened(fixture):
    return restricted(fixture).softmax(-1)


def without_the_best(out):
    return out.scatter(1, out.argmax(-1, keepdim=True), -INF)


WRONG = {
    "a logit that changed": ("top-k", lambda fixture: restricted(fixture) + 1, "has changed"),
    "a token too few": ("top-k", lambda fixture: without_the_best(restricted(fixture)), "3 of 3 rows"),
    "tokens too many": ("top-k", lambda fixture: fixture.logits, "3 of 3 rows"),
    "a nucleus too small": (
        "top-p",
        lambda fixture: without_the_best(restricted(fixture)).softmax(-1),
        "3 of 3 rows",
    ),
    "a nucleus too large": ("top-p", lambda fixture: fixture.logits.softmax(-1), "3 of 3 rows"),
    "the nucleus of everything, not of what top_k left": (
        "top-k and top-p",
        lambda fixture: restricted(fixture_of(replace(BOTH, top_k=0))).softmax(-1),
        "of 3 rows",
    ),
    "probabilities that do not add up": ("top-p", lambda fixture: softened(fixture) * 0.99, "off by"),
    "probabilities that are NaN": ("top-p", lambda fixture: softened(fixture) * torch.nan, "off by nan"),
    "a token outside": ("draw a draft token", lambda fixture: torch.tensor([0, 512, 1]), "outside the vocabulary"),
    "no token": ("argmax", lambda fixture: torch.tensor([-1, 0, 0]), "outside the vocabulary"),
    "a token that is out": (
        "draw a restricted target token",
        lambda fixture: fixture.logits.argmin(-1),
        "3 of 3 tokens are outside the kept set",
    ),
    "another than the largest": (
        "argmax",
        lambda fixture: fixture.logits.argmin(-1),
        "3 of 3 tokens are not the argmax",
    ),
}


@pytest.mark.parametrize(("case", "output", "reason"), WRONG.values(), ids=WRONG)
def test_a_wrong_result_is_not_timed_and_the_note_says_why(bench, case, output, reason):
    peers = {"wrong": lambda fixture: TimedCall(lambda: output(fixture))}
    comparison = replace(BY_CASE[case], peers=peers)
    [ours] = comparison_rows(bench, comparison, "flat", 3, 512)
    assert ours["peer_ratio"] is None and not bench.stopped
    [note] = bench.missing
    assert note.startswith(f"sampling/{case}: wrong (peer) at 3 rows of vocabulary 512, flat logits: ")
    assert reason in note


def test_a_wrong_result_of_ours_has_no_row_but_the_peers_keep_theirs(bench):
    wrong = ("ours", lambda fixture: TimedCall(lambda: fixture.logits))
    right = {"right": our_logits}
    [row] = comparison_rows(bench, replace(BY_CASE["top-k"], ours=wrong, peers=right), "flat", 3, 512)
    assert (row["backend"], row["peer"]) == ("right", True) and bench.missing


@pytest.mark.parametrize("case", [case for case in BY_CASE if case != "argmax"])
def test_the_peers_methods_are_called_as_they_are_defined(bench, peers, case):
    ours, *others = compared(bench, case)
    assert not bench.missing and {row["produces"] for row in others} == {ours["produces"]}
    assert [row["backend"] for row in others] == list(BY_CASE[case].peers) and all(row["peer"] for row in others)
    assert ours["peer_ratio"] > 0


@pytest.mark.parametrize("case", [case for case, comparison in BY_CASE.items() if comparison.draws])
def test_a_draw_that_depends_on_the_row_is_seen(bench, flashinfer, case):
    ours, *peers = compared(bench, case)
    assert ours["same_seed_same_token"] is True
    assert {row["same_seed_same_token"] for row in peers} == {False}


def test_rows_that_are_alike_are_the_first_row_seed_and_position_included():
    fixture = fixture_of(BOTH)
    drawn = our_target(fixture.alike(4)).call().tolist()
    assert drawn == our_target(fixture).call()[:1].tolist() * 4


@pytest.mark.parametrize(("large", "calls"), [(False, 20), (True, 4)])
def test_on_a_gpu_what_restores_the_logits_is_not_in_the_time(monkeypatch, large, calls):
    def time_kernels(launch, *, calls):
        done.clear()
        launch()
        counts.append(calls)
        return {"p20": len(done) * 10 - 1, "p50": len(done) * 10, "p80": len(done) * 10 + 1}

    done, counts = [], []
    monkeypatch.setattr(sampling, "time_kernels", time_kernels)
    timed = TimedCall(lambda: done.append("call"), lambda: done.append("prepare"))
    times = sampling._times(Bench(torch.device("cuda"), None), timed, large=large)
    assert times == {"gpu_us": {"p20": 9, "p50": 10, "p80": 11}} and counts == [calls, calls]


@NO_CUDA
@NO_PEER
def test_on_a_cpu_the_case_runs_ours_and_notes_the_peers():
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
def test_every_comparison_has_a_row_for_each_shape_and_kind(bench, peers):
    rows = [row for row in sampling_rows(bench) if "peer_ratio" in row]
    assert len(rows) == sum(2 * len(comparison.kinds) for comparison in COMPARISONS) and not bench.missing
