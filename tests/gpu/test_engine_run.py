"""A busy engine against each request alone: requests join at random, some are cancelled between steps or by a callback.

A sample of them is decoded one by one, and each text must be the same; a cancelled request's as far as it went.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from train_pair.attention import run_target

from attn_backends import registry
from spec_decode.engine import Engine, Generation, Handle, Request
from spec_decode.paged import GraphMode
from tests.factories import make_request
from tests.gpu import busy_engine
from tests.gpu.busy_engine import BusyRun, load_pair, make_engine, make_requests, serve

SCHEMA = "attn-engine-run/2"
REQUESTS, SAMPLE = 5000, 400
"""How many are served, half of them under each verifier, and how many of these are decoded one by one."""
VERIFIERS = ("rejection", "block")
NOISE, TRIES = 1e-4, 32
"""What roundings may move a logit by, in shares of the row's largest magnitude."""
RULE = (
    "A kernel's sums depend on the padded batch, so a text may leave its own at a decision that roundings tip. A "
    f"difference is excused only if, in one of {TRIES} more runs of the request alone, in which the logits of target "
    "and draft get noise around that token of at most `noise` times their largest magnitude, the text leaves at that "
    "very token with the token that the busy engine's text has. The same for greedy and sampled texts."
)
STOPPED = -1
"""Stands for the stop token that ended a text."""


@dataclass
class Sample:
    """How the texts of some requests compare with those of each request alone."""

    greedy: int = 0
    sampled: int = 0
    cancelled: int = 0
    equal: int = 0
    excused: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[dict[str, Any]] = field(default_factory=list)


def tokens_of(generation: Generation) -> list[int]:
    """The text, with STOPPED after one that a stop token ended."""
    return generation.token_ids + [STOPPED] * (generation.finish_reason == "stop")


class NoisyEngine:
    """An engine for one request at a time that adds noise to the logits of its pair around one token of the text."""

    def __init__(self, verification: str, device: torch.device) -> None:
        pair, self._on = load_pair(device), False
        for model in (pair.target, pair.draft):
            model.logits = self._with_noise(model.logits)  # type: ignore[method-assign, assignment]
        # The host switches the noise token by token, which no graph would see.
        self._engine = make_engine(pair, verification, max_num_seqs=1, graph_mode=GraphMode.NONE)

    def leads_to(self, request: Request, tokens: Sequence[int], at: int) -> bool:
        """Whether a noisy text is `tokens` up to and with token `at`, in any of the tries."""
        reach = 2 * (1 + busy_engine.DRAFT_TOKENS)  # the host gets up to 1 + K tokens at once, a round late
        seen = 0

        def on_token(_: int, __: int) -> None:
            nonlocal seen
            seen += 1
            self._on = seen + reach >= at

        for _ in range(TRIES):
            seen, self._on = 0, at <= reach
            if tokens_of(self._engine.generate([request], on_token=on_token)[0])[: at + 1] == tokens[: at + 1]:
                return True
        return False

    def _with_noise(self, exact: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        def logits(hidden: torch.Tensor) -> torch.Tensor:
            out = exact(hidden)
            if not self._on:
                return out
            return out + NOISE * out.abs().amax(-1, keepdim=True) * (2 * torch.rand_like(out) - 1)

        return logits


def compare(busy_run: BusyRun, handles: Sequence[Handle], alone: Engine, noisy: NoisyEngine) -> Sample:
    """Compare each of these requests' texts with that of the engine `alone`; differences are excused by RULE."""
    sample = Sample()
    for handle in handles:
        request, generation = handle.request, handle.generation
        sample.sampled += request.sampling.temperature > 0
        sample.greedy += request.sampling.temperature == 0
        sample.cancelled += generation.finish_reason == "abort"
        found, expected = tokens_of(generation), tokens_of(alone.generate([request])[0])
        if (expected[: len(found)] if generation.finish_reason == "abort" else expected) == found:
            sample.equal += 1
            continue
        pairs = enumerate(zip(found, expected, strict=False))
        at = next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(found), len(expected)))
        excused = at < len(found) and noisy.leads_to(request, found, at)
        row = {"request": busy_run.handles.index(handle), "temperature": request.sampling.temperature, "token": at}
        (sample.excused if excused else sample.wrong).append({**row, "tokens": found, "tokens_alone": expected})
    return sample


def problems_of(busy_run: BusyRun, sample: Sample) -> list[str]:
    """Why the run is no proof, or proves the opposite."""
    finished = busy_run.counts["finished"]
    found = {
        f"{len(sample.wrong)} texts differ from those decoded alone": sample.wrong,
        f"{busy_run.pages_lost} pages did not come back": busy_run.pages_lost,
        f"{finished.get('never', 0)} requests never ended": "never" in finished,
        "nobody was preempted": not busy_run.counts["preemptions"],
        "nobody was cancelled": "abort" not in finished,
        "no stop token was met": "stop" not in finished,
        "none of the sample was decoded to its end": sample.cancelled == sample.greedy + sample.sampled,
    }
    return [problem for problem, present in found.items() if present]


def run(device: torch.device, requests: int, sampled: int) -> list[dict[str, Any]]:
    """An equal part of the requests under each verifier, and the comparison of a sample of them."""
    torch.manual_seed(0)  # that of the noise
    pair, rng, rows = load_pair(device), random.Random(0), []
    for verification in VERIFIERS:
        busy_run = serve(pair, verification, make_requests(requests // len(VERIFIERS), rng), rng)
        alone = make_engine(pair, verification, max_num_seqs=1, strategy=busy_run.strategy)
        handles = rng.sample(busy_run.handles, sampled // len(VERIFIERS))
        noisy, start = NoisyEngine(verification, device), time.perf_counter()
        sample = compare(busy_run, handles, alone, noisy)
        rows.append(
            {
                "verification": verification,
                "strategy": busy_run.strategy.value if busy_run.strategy else None,
                "seconds": busy_run.seconds,
                **busy_run.counts,
                "pages_lost": busy_run.pages_lost,
                "sample": {**asdict(sample), "seconds": round(time.perf_counter() - start, 2)},
                "problems": problems_of(busy_run, sample),
            }
        )
    return rows


@pytest.mark.gpu
def test_busy_engine_texts_match_each_request_alone(write_report):
    rows = run(torch.device("cuda"), REQUESTS, SAMPLE)
    write_report(
        SCHEMA,
        backends=[busy_engine.BACKEND],
        backend=busy_engine.BACKEND,
        backend_version=registry.get(busy_engine.BACKEND).version,
        dtype=str(busy_engine.DTYPE).removeprefix("torch."),
        max_num_seqs=busy_engine.MAX_REQS,
        pages=busy_engine.POOL,
        page_size=busy_engine.PAGE_SIZE,
        draft_tokens=busy_engine.DRAFT_TOKENS,
        rule=RULE,
        noise=NOISE,
        rows=rows,
    )
    assert not [problem for row in rows for problem in row["problems"]]


# On a CPU, small: it passes for an engine that is right, and not for wrong texts.

CPU = torch.device("cpu")
GREEDY = make_request(prompt=list(b"def "), max_tokens=6)


def busy_run_of(*handles):
    return BusyRun("rejection", list(handles), None, 1.0, 0, {"preemptions": 1, "finished": {"stop": 1}})


@cache
def alone():
    return make_engine(load_pair(CPU), "rejection", max_num_seqs=1)


def finished(**changes):
    return Handle(GREEDY, generation=replace(alone().generate([GREEDY])[0], **changes))


def compared(handle):
    return compare(busy_run_of(handle), [handle], alone(), NoisyEngine("rejection", CPU))


def test_run_serves_every_request_kind_without_problems(monkeypatch):
    monkeypatch.setattr(busy_engine, "POOL", 120)
    monkeypatch.setattr(busy_engine, "MAX_REQS", 8)
    rows = run(CPU, 40, 4)
    assert [row["verification"] for row in rows] == ["rejection", "block"]
    for row in rows:
        assert sum(row["finished"].values()) == row["requests"] == 20
        assert row["preemptions"] > 0 and row["sample"]["equal"] == 2


def test_text_differing_from_its_own_fails_run(monkeypatch):
    monkeypatch.setattr(f"{__name__}.TRIES", 6)
    handle = finished()
    handle.generation.token_ids[3] += 1
    sample = compared(handle)
    assert [row["token"] for row in sample.wrong] == [3] and not sample.equal and not sample.excused
    assert "1 texts differ from those decoded alone" in problems_of(busy_run_of(handle), sample)


@pytest.mark.parametrize(("finish_reason", "equal"), [("abort", 1), ("length", 0)])
def test_only_cancelled_text_may_end_early(finish_reason, equal):
    own = finished().generation.token_ids
    assert compared(finished(token_ids=own[:3], finish_reason=finish_reason)).equal == equal


@pytest.mark.parametrize(("noise", "tries", "excused"), [(0.05, 32, True), (1e-4, 6, False)])
def test_difference_within_noise_is_excused(noise, tries, excused, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(f"{__name__}.TRIES", tries)
    monkeypatch.setattr(f"{__name__}.NOISE", noise)
    handle, target = finished(), load_pair(CPU).target
    logits = target.logits(run_target(target, torch.tensor([GREEDY.prompt]))[0, -1])
    handle.generation.token_ids[0] = int(logits.topk(2).indices[1])
    sample = compared(handle)
    assert (len(sample.excused), len(sample.wrong)) == (excused, not excused)


def test_run_without_preemption_or_cancellation_is_a_problem():
    busy_run = busy_run_of(finished())
    busy_run.counts["preemptions"], busy_run.pages_lost = 0, 2
    found = problems_of(busy_run, Sample(greedy=1, equal=1))
    assert found == ["2 pages did not come back", "nobody was preempted", "nobody was cancelled"]


def test_requests_are_of_every_kind():
    params = [request.sampling for request in make_requests(200, random.Random(0))]
    assert {p.temperature for p in params} == {0.0, 1.0} and {bool(p.stop_token_ids) for p in params} == {True, False}
    assert {p.top_k > 0 for p in params} == {p.top_p < 1 for p in params} == {True, False}
