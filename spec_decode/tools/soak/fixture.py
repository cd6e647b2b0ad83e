"""What a soak runs on: a small random draft on one backend, its drafters, and the limits of the requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from builders import AttentionSpec, RequestTables
from spec_decode.drafter import Drafter, DrafterConfig, Drafts, Strategy, StrategyError, VerifiedTokens
from spec_decode.drafter.kv_groups import KVGroup
from spec_decode.models import EagleDraft
from spec_decode.testing.draft_fixture import draft_model, draft_spec, noisy_group
from spec_decode.testing.poison import bits
from spec_decode.testing.subject import Subject
from spec_decode.tools.soak.inputs import RoundInputs
from spec_decode.tools.soak.schedule import ScheduledRound, ScheduleLimits

MAX_SEQ_LEN = {"cuda": 1024, "cpu": 128}
"""Tokens of the longest request: several splits for every kernel; on the CPU, what an emulator does quickly."""
_WINDOWS = 4
"""Sliding windows in the longest request."""

Propose = Callable[[VerifiedTokens], Drafts]


@dataclass(frozen=True, slots=True)
class SoakDrafter:
    """A drafter and the group that its cache is in: a candidate of a soak, or its eager reference."""

    drafter: Drafter
    group: KVGroup

    @property
    def strategy(self) -> str:
        name: str = self.drafter.plan.strategy.value
        return name

    def cache_bits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as integers of the cache's shape: a NaN equals itself."""
        cache = self.group.caches[0]
        return bits(cache.key), bits(cache.value)

    def copy_cache(self, other: SoakDrafter) -> None:
        """Copy the other drafter's cache."""
        for mine, its in zip(self.cache_bits(), other.cache_bits(), strict=True):
            mine.copy_(its)

    def draft(self, round_: ScheduledRound, verified: VerifiedTokens, propose: Propose | None = None) -> Drafts:
        """Run the round; its tables are loaded even if nobody joined or left. propose: None is the drafter's."""
        self.drafter.tables.load([[row.pages for row in round_.rows]], [row.limit for row in round_.rows])
        return (propose or self.drafter.propose)(verified)


@dataclass(frozen=True, slots=True)
class SoakFixture:
    """One draft model for every drafter of the soak."""

    subject: Subject
    spec: AttentionSpec
    model: EagleDraft
    limits: ScheduleLimits

    @classmethod
    def of(
        cls, subject: Subject, *, max_reqs: int, num_speculative_tokens: int, page_size: int | None = None
    ) -> SoakFixture:
        """Raises Unsupported where the backend refuses every spec of the kit, or the page size if one is asked for."""
        longest = MAX_SEQ_LEN[subject.device.type]
        spec = draft_spec(subject, window=longest // _WINDOWS, page_size=page_size)
        limits = ScheduleLimits(
            max_reqs=max_reqs,
            num_speculative_tokens=num_speculative_tokens,
            max_seq_len=longest,
            page_size=spec.page_size,
            window=spec.sliding_window,
        )
        return cls(subject, spec, draft_model(spec, subject.device, max_seq_len=longest), limits)

    def drafter(self, strategy: Strategy | None) -> SoakDrafter:
        """A drafter of its own. strategy: None takes the one with the least host work that the backend allows."""
        return self._drafter(strategy, self._tables(), noisy_group(self.subject, self.spec, self.limits.num_pages))

    def drafters(self, strategies: Iterable[Strategy]) -> tuple[list[SoakDrafter], dict[str, str]]:
        """A drafter for each strategy that can be run, over the same tables and cache, and why each other cannot."""
        tables, group = self._tables(), noisy_group(self.subject, self.spec, self.limits.num_pages)
        made, refused = [], {}
        for strategy in strategies:
            try:
                made.append(self._drafter(strategy, tables, group))
            except StrategyError as error:
                refused[strategy.value] = str(error)
        return made, refused

    def _tables(self) -> RequestTables:
        limits = self.limits
        return RequestTables(
            page_sizes=[self.spec.page_size],
            num_pages=[limits.num_pages],
            max_reqs=limits.max_reqs,
            max_seq_len=limits.max_seq_len,
            device=self.subject.device,
        )

    def _drafter(self, strategy: Strategy | None, tables: RequestTables, group: KVGroup) -> SoakDrafter:
        config = DrafterConfig(num_speculative_tokens=self.limits.num_speculative_tokens, strategy=strategy)
        return SoakDrafter(Drafter(self.model, [group], tables, config), group)

    def inputs(self, seed: int) -> RoundInputs:
        """Buffers for the rounds' inputs."""
        config, device, limits = self.model.config, self.subject.device, self.limits
        k = limits.num_speculative_tokens
        return RoundInputs(config, self.spec.dtype, device, max_reqs=limits.max_reqs, k=k, seed=seed)
