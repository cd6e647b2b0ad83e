"""Restricting, drawing and argmax over a step's logits, beside FlashInfer's sampling and torch: same logits, same run.

Rows are requests while drafting, and requests * (1 + K) while verifying. Before anything is timed, its result is held
against fp64: a kept set, and the probabilities of it, or a token. Who fails has no row, and a note says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import torch

from spec_decode.sampling import SamplingParams
from spec_decode.tools.bench.measure import time_call, time_kernels
from spec_decode.tools.bench.rows import Bench, BenchRow
from spec_decode.tools.bench.sampling_ways import (
    Contender,
    SamplingScene,
    Way,
    both_renorm,
    from_logits,
    from_probs,
    from_restricted,
    mask_renorm,
    our_draft,
    our_logits,
    our_probs,
    our_target,
    top_k_mask,
    top_p_renorm,
    torch_argmax,
)

NAME = "sampling"
_SHAPES = ((32_000, 151_936), (1, 4, 32, 256))
"""Vocabularies and rows."""
_SHAPES_ON_CPU = ((512,), (1, 4))
_GRAIN = 1e-5
"""Of a row's probability: sums of fp32 may err by this at top_p's threshold, and a probability by this."""
_ALIKE = 8
"""Rows of one distribution and seed, over hundreds of tokens: not by chance do all draw the same."""
_LARGE = 1 << 20
"""Logits of a scene that takes so long that few calls are enough for a timing."""

Judge = Callable[[torch.Tensor], str | None]
"""Why an output is wrong; None where it is right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingContest:
    """A way of ours, by name, and those that produce the same; draws: tokens that a seed decides."""

    case: str
    produces: str
    ours: tuple[str, Way]
    peers: Mapping[str, Way]
    params: SamplingParams
    judge: Callable[[SamplingScene], Judge]
    kinds: tuple[str, ...] = ("flat",)
    draws: bool = False


def threshold(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """The least logit fp64 [R, 1] that stays of logits fp64 [R, V], by sorting; top_k 0 and top_p from 1 on are off."""
    ranked = logits.sort(-1, descending=True).values[:, : top_k or None]
    if top_p >= 1:
        return ranked[:, -1:]
    last = (ranked.softmax(-1).cumsum(-1) < top_p).sum(-1, keepdim=True)
    return ranked.gather(1, last.clamp(max=ranked.shape[1] - 1))


def judge_logits(scene: SamplingScene) -> Judge:
    """Restricted logits: what stays is as it was, and everything else is -inf."""
    belongs = _judge_kept(scene)

    def judge(out: torch.Tensor) -> str | None:
        kept = out > -torch.inf
        if not torch.equal(out[kept], scene.logits[kept]):
            return "a logit that stays has changed"
        return belongs(kept)

    return judge


def judge_probs(scene: SamplingScene) -> Judge:
    """Probabilities: those of the tokens that stay among themselves, and 0 elsewhere."""
    belongs, exact = _judge_kept(scene), scene.logits.double()

    def judge(out: torch.Tensor) -> str | None:
        kept = out > 0
        error = float((out - exact.masked_fill(~kept, -torch.inf).softmax(-1)).abs().max())
        if not error < _GRAIN:
            return f"a probability is off by {error:.1e}, more than {_GRAIN:g}"
        return belongs(kept)

    return judge


def judge_tokens(scene: SamplingScene) -> Judge:
    """Drawn tokens: each is one that may be drawn."""
    exact = scene.logits.double()
    return _judge_among(exact >= threshold(exact, scene.params.top_k, scene.params.top_p + _GRAIN), "may not be drawn")


def judge_argmax(scene: SamplingScene) -> Judge:
    """Greedy tokens: each has its row's largest logit."""
    return _judge_among(scene.logits == scene.logits.amax(-1, keepdim=True), "are not the argmax")


def _judge_among(right: torch.Tensor, why: str) -> Judge:
    def judge(out: torch.Tensor) -> str | None:
        if not bool(((out >= 0) & (out < right.shape[1])).all()):
            return "a token lies outside the vocabulary"
        wrong = int((~right.gather(1, out.long()[:, None])).sum())
        return f"{wrong} of {len(out)} tokens {why}" if wrong else None

    return judge


def _judge_kept(scene: SamplingScene) -> Judge:
    exact, top_k, top_p = scene.logits.double(), scene.params.top_k, scene.params.top_p
    slack = _GRAIN if top_p < 1 else 0.0
    must, may = (threshold(exact, top_k, share) for share in (top_p - slack, top_p + slack))

    def judge(kept: torch.Tensor) -> str | None:
        wrong = (((exact >= must) & ~kept) | ((exact < may) & kept)).any(-1)
        return f"keeps other tokens than fp64 does in {int(wrong.sum())} of {len(wrong)} rows" if wrong.any() else None

    return judge


_BOTH = SamplingParams(temperature=1.0, top_k=50, top_p=0.9)
_TOP_K = SamplingParams(temperature=1.0, top_k=50)
_TOP_P = SamplingParams(temperature=1.0, top_p=0.9)
_FREE = SamplingParams(temperature=1.0)
_DRAWS: dict[str, Way] = {"sampling_from_logits": from_logits, "softmax, sampling_from_probs": from_probs}
_KINDS = ("peaked", "flat")

CONTESTS = (
    SamplingContest(
        case="top-k",
        produces="logits",
        ours=("restrict_logits", our_logits),
        peers={"top_k_mask_logits": top_k_mask},
        params=_TOP_K,
        judge=judge_logits,
        kinds=_KINDS,
    ),
    SamplingContest(
        case="top-p",
        produces="probabilities",
        ours=("restrict_logits, softmax", our_probs),
        peers={"softmax, top_p_renorm_probs": top_p_renorm},
        params=_TOP_P,
        judge=judge_probs,
        kinds=_KINDS,
    ),
    SamplingContest(
        case="top-k and top-p",
        produces="probabilities",
        ours=("restrict_logits, softmax", our_probs),
        peers={
            "softmax, top_k_renorm_probs, top_p_renorm_probs": both_renorm,
            "top_k_mask_logits, softmax, top_p_renorm_probs": mask_renorm,
        },
        params=_BOTH,
        judge=judge_probs,
        kinds=_KINDS,
    ),
    SamplingContest(
        case="draw a draft token",
        produces="tokens",
        ours=("sample_draft", our_draft),
        peers=_DRAWS,
        params=_FREE,
        judge=judge_tokens,
        draws=True,
    ),
    SamplingContest(
        case="draw a target token",
        produces="tokens",
        ours=("sample_target", our_target),
        peers=_DRAWS,
        params=_FREE,
        judge=judge_tokens,
        draws=True,
    ),
    SamplingContest(
        case="draw a restricted target token",
        produces="tokens",
        ours=("sample_target", our_target),
        peers={"softmax, top_k_top_p_sampling_from_probs": from_restricted},
        params=_BOTH,
        judge=judge_tokens,
        draws=True,
    ),
    SamplingContest(
        case="argmax",
        produces="tokens",
        ours=("sample_draft", our_draft),
        peers={"torch.argmax": torch_argmax},
        params=SamplingParams(),
        judge=judge_argmax,
    ),
)


def sampling_rows(bench: Bench) -> Iterator[BenchRow]:
    """Every contest at every vocabulary, number of rows and kind of logits."""
    vocabularies, counts = _SHAPES if bench.on_cuda else _SHAPES_ON_CPU
    for contest in CONTESTS:
        for vocab, rows, kind in product(vocabularies, counts, contest.kinds):
            yield from contest_rows(bench, contest, kind, rows, vocab)


def contest_rows(bench: Bench, contest: SamplingContest, kind: str, rows: int, vocab: int) -> Iterator[BenchRow]:
    """A row of ours, with its time over the best peer's, and one of each peer that is there and right."""
    scene = SamplingScene.make(kind, rows, vocab, contest.params, bench.device)
    judge = contest.judge(scene)
    name, way = contest.ours
    ours = _timed(bench, contest, scene, judge, name, way)
    timed = (_timed(bench, contest, scene, judge, each, peer, peer=True) for each, peer in contest.peers.items())
    peers = [row for row in timed if row]
    if ours:
        best = min((_median(row) for row in peers), default=None)
        yield {**ours, "peer_ratio": best and round(_median(ours) / best, 3)}
    yield from peers


def _timed(
    bench: Bench,
    contest: SamplingContest,
    scene: SamplingScene,
    judge: Judge,
    name: str,
    way: Way,
    *,
    peer: bool = False,
) -> BenchRow | None:
    rows, vocab = scene.logits.shape
    spec = f"vocabulary {vocab}, {scene.kind} logits"
    what, at = f"{NAME}/{contest.case}: {name}{' (peer)' * peer}", f"{rows} rows of {spec}"
    with bench.noting(what, at=at):
        contender = way(scene)
        if wrong := judge(contender.call()):
            bench.miss(f"{what} at {at}", wrong)
            return None
        return {
            "case": f"{NAME}/{contest.case}",
            "backend": name,
            "peer": peer,
            "spec": spec,
            "num_reqs": rows,
            "vocabulary": vocab,
            "produces": contest.produces,
            "same_seed_same_token": _same_token(way, scene) if contest.draws else None,
            **_times(bench, contender, large=scene.logits.numel() >= _LARGE),
        }
    return None


def _same_token(way: Way, scene: SamplingScene) -> bool:
    """Whether a request's draw is the same in every row of a batch."""
    tokens = way(scene.alike(_ALIKE)).call()
    return bool((tokens == tokens[0]).all())


def _times(bench: Bench, contender: Contender, *, large: bool) -> BenchRow:
    """gpu_us of the call without its preparation, from graphs; without a GPU, wall_us."""
    prepare = contender.prepare or (lambda: None)
    if not bench.on_cuda:
        return {"wall_us": time_call(contender.call, bench.device, prepare=prepare).wall_us}
    calls = 4 if large else 20
    whole = time_kernels(lambda: (prepare(), contender.call()), calls=calls)
    before = time_kernels(prepare, calls=calls)["p50"] if contender.prepare else 0.0
    return {"gpu_us": {name: round(value - before, 3) for name, value in whole.items()}}


def _median(row: BenchRow) -> float:
    median: float = row["gpu_us" if "gpu_us" in row else "wall_us"]["p50"]
    return median
