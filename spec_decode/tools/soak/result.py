"""What a soak was asked to do, what it saw, and the report of it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from builders.errors import require
from spec_decode.drafter import Strategy
from spec_decode.environment import Environment
from spec_decode.files import report_bytes
from spec_decode.source_digests import SourceRecord
from spec_decode.testing.outcome import Outcome
from spec_decode.tools.soak.memory import Memory

SCHEMA = "attn-soak/4"
_MOST_REQS = 256
_SEEDS = 2**62


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How long, over how many requests at most, with K draft tokens a round, in which strategies.

    compare_every: of so many rounds in a row, one is repeated eagerly and compared. strategies: none stands for all
    that the backend can be drafted with. Raises BatchError for nonsense.
    """

    rounds: int = 20_000
    max_reqs: int = 8
    num_speculative_tokens: int = 4
    seed: int = 0
    compare_every: int = 10
    strategies: tuple[Strategy, ...] = ()

    def __post_init__(self) -> None:
        require(
            1 <= self.max_reqs <= _MOST_REQS,
            f"a soak drafts for 1 to {_MOST_REQS} requests at once, got {self.max_reqs}; nothing was run. Choose a "
            "number between.",
        )
        require(
            self.num_speculative_tokens >= 1,
            f"a soak drafts at least 1 token a round, got K = {self.num_speculative_tokens}; nothing was run. Raise K.",
        )
        require(
            self.compare_every >= 1,
            f"a soak compares one of every N rounds, got N = {self.compare_every}; nothing was run. Pass 1 or more.",
        )
        require(
            self.rounds >= self.fewest_rounds,
            f"a soak of up to {self.max_reqs} requests needs at least {self.fewest_rounds} rounds, got {self.rounds}: "
            "a warm-up of every captured batch size in every strategy, and as many to see that memory stays. Nothing "
            "was run; run more.",
        )
        require(
            0 <= self.seed < _SEEDS, f"a seed must be 0 to 2**62 - 1, got {self.seed}; nothing was run. Choose another."
        )

    @property
    def fewest_rounds(self) -> int:
        return 2 * self.max_reqs.bit_length() * len(self.strategies or Strategy) + 2


class Failure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ended a soak, and for which request, where one can be named."""

    round: int
    """From 0, which set-up belongs to. A kernel that crashes shows at the next wait, at most a round later."""
    what: str
    """token, logit, nan, cache, flag, memory or exception."""
    detail: str
    strategy: str = ""
    row: int | None = None
    request: int | None = None

    def describe(self, seed: int) -> str:
        """One line."""
        where = f", {self.strategy}" if self.strategy else ""
        where += "" if self.row is None else f", row {self.row} (request {self.request})"
        return f"{self.what} in round {self.round}{where}, seed {seed}: {self.detail}"


class StrategyRounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rounds that were run in a strategy, and how many of them were compared with eager drafting."""

    rounds: int
    compared: int


class SoakResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One backend's soak; its counts are of the rounds that ended well.

    strategies: those that were run. refused: why each other was not.
    """

    backend: str
    version: str
    outcome: Outcome
    reason: str = ""
    failure: Failure | None = None
    repro: str
    spec: str = ""
    strategies: dict[str, StrategyRounds] = {}
    refused: dict[str, str] = {}
    max_seq_len: int = 0
    rounds: int = 0
    warm_up: int = 0
    compared: int = 0
    joins: int = 0
    leaves: int = 0
    limit_hits: int = 0
    tokens: int = 0
    seconds: float = 0.0
    memory: Memory | None = None

    def summary(self) -> str:
        """One line."""
        if self.outcome is not Outcome.PASS:
            return f"{self.backend}: {self.outcome.value} after {self.rounds} rounds: {self.reason}"
        names = ", ".join(self.strategies)
        return (
            f"{self.backend}: pass, {self.rounds} rounds ({names}) in {self.seconds:.1f} s, {self.compared} "
            f"compared with eager; {self.joins} joins, {self.leaves} leaves, {self.limit_hits} at the limit, "
            f"{self.tokens} tokens; {self._memory_text()}"
        )

    def _memory_text(self) -> str:
        if (memory := self.memory) is None:
            return "memory not measured"
        parts = []
        if memory.allocated_end is not None and memory.reserved_most is not None:
            parts.append(f"{_mib(memory.allocated_end)} allocated throughout, {_mib(memory.reserved_most)} reserved")
        if memory.resident_warm is not None and memory.resident_end is not None:
            parts.append(f"resident set {_mib(memory.resident_end - memory.resident_warm, '+')}")
        return ", ".join(parts)


class SoakReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The soak of every backend asked for, on one device. sources: the modules behind it."""

    schema: str = SCHEMA
    env: Environment
    command: str
    sources: SourceRecord = SourceRecord()
    options: Options
    results: tuple[SoakResult, ...]
    digest: str = ""

    @property
    def ok(self) -> bool:
        """At least one soak, and every one passed."""
        return bool(self.results) and all(result.outcome is Outcome.PASS for result in self.results)

    def to_json(self) -> bytes:
        """The file: in a stable order, sealed."""
        return report_bytes({name: value for name, value in msgspec.to_builtins(self).items() if name != "digest"})


def _mib(count: int, sign: str = "") -> str:
    return f"{count / 2**20:{sign}.1f} MiB"
