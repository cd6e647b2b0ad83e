"""Soak one backend, or several one after the other in this process."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from attn_backends import AttentionBackend, BackendError, registry
from builders.errors import require
from builders.kernels.triton_runtime import torch_implementations
from spec_decode.drafter import Strategy, VerifiedTokens
from spec_decode.environment import environment
from spec_decode.source_digests import SourceRecord, backend_modules
from spec_decode.testing.expectations import Unsupported
from spec_decode.testing.memory import read, reset_peaks
from spec_decode.testing.outcome import Outcome
from spec_decode.testing.subject import Subject
from spec_decode.tools.soak.difference import difference
from spec_decode.tools.soak.fixture import MAX_SEQ_LEN, SoakFixture
from spec_decode.tools.soak.inputs import CHUNK
from spec_decode.tools.soak.memory import Memory
from spec_decode.tools.soak.result import Failure, Options, SoakReport, SoakResult, StrategyRounds
from spec_decode.tools.soak.schedule import Schedule, ScheduledRound

_WARM_UP = 500

OnResult = Callable[[SoakResult], None]


def soak(
    names: Sequence[str],
    *,
    device: torch.device,
    options: Options,
    on_progress: OnResult | None = None,
    on_result: OnResult | None = None,
) -> SoakReport:
    """Soak registered backends; never raises for one that fails.

    on_progress is given the counts so far, now and then. After a backend that made a CUDA device unusable for this
    process the others are not_run. Raises BatchError for more draft tokens than a request has room for.
    """
    # Read first: a device may not answer any more at the end.
    env = environment(device)
    results: list[SoakResult] = []
    for name in names:
        results.append(_lost(name, device, options) or soak_backend(name, device, options, on_progress))
        if on_result:
            on_result(results[-1])
    return SoakReport(
        env=env,
        command=command_line(names, device, options),
        sources=SourceRecord.of({"soak": [__name__, *backend_modules(names)]}),
        options=options,
        results=tuple(results),
    )


def soak_backend(
    backend: str | AttentionBackend, device: torch.device, options: Options, on_progress: OnResult | None = None
) -> SoakResult:
    """Run options.rounds rounds, each strategy in its turn; the first thing that is wrong ends them."""
    _require_room(options, device)
    run = _Run(backend if isinstance(backend, str) else backend.name, device, options)
    try:
        # On the CPU an interpreted kernel would take a second a round; the conformance checks cover the kernels.
        with torch.no_grad(), torch_implementations():
            failure = run.go(registry.get(backend) if isinstance(backend, str) else backend, on_progress)
    except BackendError as error:
        return run.result(Outcome.UNAVAILABLE, reason=str(error))
    except Unsupported as refusal:
        return run.result(Outcome.UNSUPPORTED, reason=str(refusal))
    except Exception as error:  # a backend may fail in any way, and must not cost the others their soak
        return run.failed(Outcome.ERROR, run.failure("exception", f"{type(error).__name__}: {error}", run.strategy))
    return run.failed(Outcome.FAIL, failure) if failure else run.result(Outcome.PASS)


class _Run:
    """One backend's soak, and what it has counted so far."""

    def __init__(self, name: str, device: torch.device, options: Options) -> None:
        self.name, self.device, self.options = name, device, options
        self.counts: Counter[str] = Counter()
        self.rounds: Counter[str] = Counter()
        self.compared: Counter[str] = Counter()
        self.strategy = ""
        self.facts: dict[str, Any] = {"version": "unknown"}
        self.start = time.perf_counter()

    def go(self, backend: AttentionBackend, on_progress: OnResult | None) -> Failure | None:
        """Everything, set-up included."""
        reset_peaks(self.device)
        self._set_up(Subject(backend, self.device))
        self.start = time.perf_counter()
        for round_, verified in self.inputs.rounds(self.schedule, self.options.rounds):
            if failure := self._round(round_, verified):
                return failure
            done = self.counts["rounds"]
            if on_progress and (done % CHUNK == 0 or done == self.options.rounds):
                on_progress(self.result(Outcome.NOT_RUN))
        self.facts["memory"] = memory = Memory.between(self.device, self.warm, read(self.device))
        grown = memory.growth()
        return self.failure("memory", grown) if grown else None

    def _set_up(self, subject: Subject) -> None:
        options, k = self.options, self.options.num_speculative_tokens
        fixture = SoakFixture.of(subject, max_reqs=options.max_reqs, num_speculative_tokens=k)
        self.facts |= {
            "version": str(subject.backend.version),
            "spec": fixture.spec.describe(),
            "max_seq_len": fixture.limits.max_seq_len,
        }
        self.candidates, refused = fixture.drafters(options.strategies or Strategy)
        if not self.candidates or (refused and options.strategies):
            raise Unsupported(" ".join(refused.values()))
        self.reference = fixture.drafter(Strategy.EAGER)
        for candidate in self.candidates:
            candidate.drafter.capture()
        self.warm_up = min(_WARM_UP, options.rounds // 2)
        self.facts |= {"refused": refused, "warm_up": self.warm_up}
        sizes = self.candidates[0].drafter.graphs.sizes
        self.schedule = Schedule(
            fixture.limits,
            # What a strategy's first round of a batch size allocates or compiles belongs to the warm-up.
            first=[size for size in sizes for _ in self.candidates],
            compare_every=options.compare_every,
            seed=options.seed,
        )
        self.inputs = fixture.inputs(options.seed)

    def _round(self, round_: ScheduledRound, verified: VerifiedTokens) -> Failure | None:
        candidate = self.candidates[round_.index % len(self.candidates)]
        self.strategy = candidate.strategy
        if round_.compared:
            self.reference.copy_cache(candidate)
        drafts = candidate.draft(round_, verified)
        if round_.compared:
            expected = self.reference.draft(round_, verified)
            if failure := difference(round_, candidate, drafts, self.reference, expected):
                return failure
            self.compared[self.strategy] += 1
        self.rounds[self.strategy] += 1
        self.counts.update(
            rounds=1,
            compared=int(round_.compared),
            joins=round_.joined,
            leaves=round_.left,
            limit_hits=round_.at_limit,
            tokens=sum(row.drafts for row in round_.rows),
        )
        if self.counts["rounds"] == self.warm_up:
            self.warm = read(self.device)
        return None

    def failure(self, what: str, detail: str, strategy: str = "") -> Failure:
        """A failure in the present round."""
        return Failure(round=self.counts["rounds"], what=what, detail=detail, strategy=strategy)

    def failed(self, outcome: Outcome, failure: Failure) -> SoakResult:
        return self.result(outcome, reason=failure.describe(self.options.seed), failure=failure)

    def result(self, outcome: Outcome, *, reason: str = "", failure: Failure | None = None) -> SoakResult:
        """The counts so far. outcome: not_run while it is still open."""
        return SoakResult(
            backend=self.name,
            outcome=outcome,
            reason=reason,
            failure=failure,
            repro=command_line([self.name], self.device, self.options),
            seconds=round(time.perf_counter() - self.start, 3),
            strategies={
                name: StrategyRounds(rounds=rounds, compared=self.compared[name])
                for name, rounds in self.rounds.items()
            },
            **{**self.facts, **self.counts},
        )


def command_line(names: Sequence[str], device: torch.device, options: Options) -> str:
    """The command that does the same again: nothing in a soak depends on anything else."""
    size = f"--rounds {options.rounds} --max-reqs {options.max_reqs} -k {options.num_speculative_tokens}"
    words = f"{size} --compare-every {options.compare_every} --seed {options.seed} --device {device}".split()
    words += [word for strategy in options.strategies for word in ("--strategy", strategy.value)]
    return shlex.join(["attn-backends", "soak", *names, *words])


def _require_room(options: Options, device: torch.device) -> None:
    longest = MAX_SEQ_LEN[device.type]
    require(
        2 * (options.num_speculative_tokens + 1) <= longest,
        f"a round takes 1 + K tokens and the requests of a soak on {device.type} hold {longest}, got K = "
        f"{options.num_speculative_tokens}; fewer than two rounds would fit a request, so nothing was run. Lower K.",
    )


def _lost(name: str, device: torch.device, options: Options) -> SoakResult | None:
    """The result of a backend whose turn comes after a fatal error; None while the device still answers."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:  # whatever it is, it will be the same for every later call
        reason = f"an earlier backend left this process no usable device: {type(error).__name__}: {error}"
        return _Run(name, device, options).result(Outcome.NOT_RUN, reason=reason)
    return None
