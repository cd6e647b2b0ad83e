"""Restricting, drawing and argmax over a step's logits, next to FlashInfer's sampling, Qrita and torch: same logits,
same run.

Rows are requests when drafting, and requests * (1 + K) when verifying. Before a method is timed, its result is compared
with fp64: the kept set and its probabilities, or a token. A wrong method gets no row, only a note saying why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

import torch

from benchmarks import sampling_methods as by
from benchmarks.measure import time_call, time_kernels
from benchmarks.rows import Bench, BenchRow
from benchmarks.sampling_methods import SamplingFixture, SamplingMethod, TimedCall
from spec_decode.sampling import SamplingParams

NAME = "sampling"
_SHAPES = ((32_000, 151_936), (1, 4, 32, 256))
"""Vocabularies and rows."""
_SHAPES_ON_CPU = ((512,), (1, 4))
_GRAIN = 1e-5
"""Share of a row's probability: the error allowed to fp32 sums at top_p's threshold, and to a probability."""
_ALIKE = 8
"""Rows with the same distribution and seed, over hundreds of tokens: they cannot all draw the same by chance."""
_LARGE = 1 << 20
"""Logits from which a fixture takes so long that few calls suffice for a timing."""

CheckOutput = Callable[[SamplingFixture, torch.Tensor], str | None]
"""Why an output is wrong; None if it is right."""


@dataclass(frozen=True, slots=True)
class SamplingComparison:
    """One of our methods and its peers, by name. kinds: of logits; draws: seeds decide the tokens."""

    case: str
    produces: str
    ours: tuple[str, SamplingMethod]
    peers: Mapping[str, SamplingMethod]
    params: SamplingParams
    check: CheckOutput
    kinds: tuple[str, ...] = ("flat",)
    draws: bool = False


def threshold(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Return the smallest kept logit fp64 [R, 1] of logits fp64 [R, V], by sorting; top_k 0 and top_p >= 1 are off."""
    ranked = logits.sort(-1, descending=True).values[:, : top_k or None]
    if top_p >= 1:
        return ranked[:, -1:]
    last = (ranked.softmax(-1).cumsum(-1) < top_p).sum(-1, keepdim=True)
    return ranked.gather(1, last.clamp(max=ranked.shape[1] - 1))


def check_logits(fixture: SamplingFixture, out: torch.Tensor) -> str | None:
    """Check restricted logits fp32 [R, V]: kept ones are unchanged, all others are -inf."""
    kept = out > -torch.inf
    if not torch.equal(out[kept], fixture.logits[kept]):
        return "a kept logit has changed"
    return _check_kept(fixture, kept)


def check_probs(fixture: SamplingFixture, out: torch.Tensor) -> str | None:
    """Check probabilities fp32 [R, V]: renormalised over the kept tokens, 0 elsewhere."""
    kept = out > 0
    exact = fixture.logits.double().masked_fill(~kept, -torch.inf).softmax(-1)
    error = float((out - exact).abs().max())
    if not error < _GRAIN:
        return f"a probability is off by {error:.1e}, more than {_GRAIN:g}"
    return _check_kept(fixture, kept)


def check_tokens(fixture: SamplingFixture, out: torch.Tensor) -> str | None:
    """Check drawn tokens [R]: each is allowed."""
    exact, params = fixture.logits.double(), fixture.params
    return _check_among(out, exact >= threshold(exact, params.top_k, params.top_p + _GRAIN), "are outside the kept set")


def check_argmax(fixture: SamplingFixture, out: torch.Tensor) -> str | None:
    """Check greedy tokens [R]: each has its row's largest logit."""
    return _check_among(out, fixture.logits == fixture.logits.amax(-1, keepdim=True), "are not the argmax")


def _check_among(tokens: torch.Tensor, right: torch.Tensor, why: str) -> str | None:
    if not bool(((tokens >= 0) & (tokens < right.shape[1])).all()):
        return "a token lies outside the vocabulary"
    wrong = int((~right.gather(1, tokens.long()[:, None])).sum())
    return f"{wrong} of {len(tokens)} tokens {why}" if wrong else None


def _check_kept(fixture: SamplingFixture, kept: torch.Tensor) -> str | None:
    exact, top_k, top_p = fixture.logits.double(), fixture.params.top_k, fixture.params.top_p
    slack = _GRAIN if top_p < 1 else 0.0
    must, may = (threshold(exact, top_k, share) for share in (top_p - slack, top_p + slack))
    wrong = (((exact >= must) & ~kept) | ((exact < may) & kept)).any(-1)
    return f"keeps other tokens than fp64 in {int(wrong.sum())} of {len(wrong)} rows" if wrong.any() else None


_BOTH = SamplingParams(temperature=1.0, top_k=50, top_p=0.9)
_TOP_K, _TOP_P = replace(_BOTH, top_p=1.0), replace(_BOTH, top_k=0)
_FREE, _GREEDY = SamplingParams(temperature=1.0), SamplingParams()
_KINDS = ("peaked", "flat")
_LOGITS, _PROBS = ("restrict_logits", by.our_logits), ("restrict_logits, softmax", by.our_probs)
_DRAFT, _TARGET = ("sample_draft", by.our_draft), ("sample_target", by.our_target)
_DRAWS = {"sampling_from_logits": by.from_logits, "softmax, sampling_from_probs": by.from_probs}
_RESTRICTED_DRAW = {"softmax, top_k_top_p_sampling_from_probs": by.from_restricted}
_TOP_K_PEERS = {"top_k_mask_logits": by.top_k_mask, "apply_top_k_top_p_triton": by.qrita_logits}
_QRITA_PROBS = {"apply_top_k_top_p_triton, softmax": by.qrita_probs}
_TOP_P_PEERS = {"softmax, top_p_renorm_probs": by.top_p_renorm, **_QRITA_PROBS}
_BOTH_PEERS = {
    "softmax, top_k_renorm_probs, top_p_renorm_probs": by.both_renorm,
    "top_k_mask_logits, softmax, top_p_renorm_probs": by.mask_renorm,
    **_QRITA_PROBS,
}

COMPARISONS = (
    SamplingComparison("top-k", "logits", _LOGITS, _TOP_K_PEERS, _TOP_K, check_logits, _KINDS),
    SamplingComparison("top-p", "probabilities", _PROBS, _TOP_P_PEERS, _TOP_P, check_probs, _KINDS),
    SamplingComparison("top-k and top-p", "probabilities", _PROBS, _BOTH_PEERS, _BOTH, check_probs, _KINDS),
    SamplingComparison("draw a draft token", "tokens", _DRAFT, _DRAWS, _FREE, check_tokens, draws=True),
    SamplingComparison("draw a target token", "tokens", _TARGET, _DRAWS, _FREE, check_tokens, draws=True),
    SamplingComparison(
        "draw a restricted target token", "tokens", _TARGET, _RESTRICTED_DRAW, _BOTH, check_tokens, draws=True
    ),
    SamplingComparison("argmax", "tokens", _DRAFT, {"torch.argmax": by.torch_argmax}, _GREEDY, check_argmax),
    SamplingComparison(
        "argmax of a target", "tokens", _TARGET, {"torch.argmax": by.torch_argmax}, _GREEDY, check_argmax
    ),
)


def sampling_rows(bench: Bench) -> Iterator[BenchRow]:
    """Yield every comparison at every vocabulary, number of rows and kind of logits."""
    vocabularies, counts = _SHAPES if bench.on_cuda else _SHAPES_ON_CPU
    for comparison in COMPARISONS:
        for vocab, rows, kind in product(vocabularies, counts, comparison.kinds):
            yield from comparison_rows(bench, comparison, kind, rows, vocab)


def comparison_rows(
    bench: Bench, comparison: SamplingComparison, kind: str, rows: int, vocab: int
) -> Iterator[BenchRow]:
    """Yield a row of our method, with its time over the best peer's, and one of each peer available and right."""
    fixture = SamplingFixture.make(kind, rows, vocab, comparison.params, bench.device)
    ours = _timed(bench, comparison, fixture, *comparison.ours)
    timed = (_timed(bench, comparison, fixture, *peer) for peer in comparison.peers.items())
    peers = [row for row in timed if row]
    if ours:
        best = min((_median(row) for row in peers), default=None)
        yield {**ours, "peer_ratio": best and round(_median(ours) / best, 3)}
    yield from peers


def _timed(
    bench: Bench, comparison: SamplingComparison, fixture: SamplingFixture, name: str, method: SamplingMethod
) -> BenchRow | None:
    (rows, vocab), peer = fixture.logits.shape, name in comparison.peers
    spec = f"vocabulary {vocab}, {fixture.kind} logits"
    what, at = f"{NAME}/{comparison.case}: {name}{' (peer)' * peer}", f"{rows} rows of {spec}"
    with bench.noting(what, at=at):
        timed = method(fixture)
        if wrong := comparison.check(fixture, timed.call()):
            bench.miss(f"{what} at {at}", wrong)
            return None
        drawn = method(fixture.alike(_ALIKE)).call() if comparison.draws else None
        same_token = None if drawn is None else bool((drawn == drawn[0]).all())
        return {
            "case": f"{NAME}/{comparison.case}",
            "backend": name,
            "peer": peer,
            "spec": spec,
            "num_reqs": rows,
            "vocabulary": vocab,
            "produces": comparison.produces,
            "same_seed_same_token": same_token,
            **_times(bench, timed, large=fixture.logits.numel() >= _LARGE),
        }
    return None


def _times(bench: Bench, timed: TimedCall, *, large: bool) -> BenchRow:
    """Return gpu_us of the call without its preparation, from graphs; without a GPU, wall_us."""
    prepare = timed.prepare or (lambda: None)
    if not bench.on_cuda:
        return {"wall_us": time_call(timed.call, bench.device, prepare=prepare).wall_us}
    calls = 4 if large else 20
    whole = time_kernels(lambda: (prepare(), timed.call()), calls=calls)
    before = time_kernels(prepare, calls=calls)["p50"] if timed.prepare else 0.0
    return {"gpu_us": {name: round(value - before, 3) for name, value in whole.items()}}


def _median(row: BenchRow) -> float:
    median: float = row["gpu_us" if "gpu_us" in row else "wall_us"]["p50"]
    return median
