"""A drafter over the draft fixture, and rounds for it in which requests join, leave and reach their limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from spec_decode.conformance.draft_runs import verified_tokens
from spec_decode.conformance.soak_schedule import Schedule, ScheduledRound
from spec_decode.drafter import Drafter, Drafts, Strategy, VerifiedTokens
from spec_decode.testing.draft_fixture import DraftFixture
from spec_decode.testing.poison import bits
from spec_decode.testing.subject import Subject

MAX_REQS, DRAFT_TOKENS = 8, 4
MAX_SEQ_LEN = {"cuda": 1024, "cpu": 128}
"""Tokens of the longest request: several splits for every kernel; on the CPU, what the emulator runs quickly."""
COMPARE_EVERY = 10


def soak_fixture(subject: Subject, page_size: int | None = None) -> DraftFixture:
    """Make the draft fixture for these rounds. Raises Unsupported if the backend rejects it."""
    longest = MAX_SEQ_LEN[subject.device.type]
    return DraftFixture.make(subject, MAX_REQS, DRAFT_TOKENS, max_seq_len=longest, page_size=page_size)


def soak_rounds(
    fixture: DraftFixture, first: Sequence[int], seed: int
) -> Iterator[tuple[ScheduledRound, VerifiedTokens]]:
    """Yield rounds without end, each with its inputs. first: the number of requests in each of the first rounds."""
    schedule = Schedule(
        max_reqs=fixture.num_reqs,
        num_speculative_tokens=fixture.num_speculative_tokens,
        max_seq_len=fixture.max_seq_len,
        page_size=fixture.spec.page_size,
        window=fixture.spec.sliding_window,
        first=first,
        compare_every=COMPARE_EVERY,
        seed=seed,
    )
    for round_ in schedule:
        # No local keeps the tensors alive, or memory would depend on the row count of the last round.
        yield round_, _verified(fixture, round_, seed)


def _verified(fixture: DraftFixture, round_: ScheduledRound, seed: int) -> VerifiedTokens:
    rows, device = round_.rows, fixture.subject.device
    verified = verified_tokens(fixture, [row.context for row in rows], 0.0, seed + round_.index)
    return verified._replace(
        accepted=torch.tensor([row.accepted for row in rows], dtype=torch.int32, device=device),
        temperature=torch.tensor([row.temperature for row in rows], device=device),
        seeds=torch.tensor([row.seed for row in rows], device=device),
    )


@dataclass(frozen=True, slots=True)
class SoakDrafter:
    """A drafter, and its keys and values viewed as integers of the cache's shape, so that a NaN equals itself."""

    drafter: Drafter
    cache: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def make(cls, fixture: DraftFixture, strategy: Strategy | None) -> SoakDrafter:
        """As `DraftFixture.drafter`. Raises StrategyError for a strategy that the backend does not allow."""
        drafter = fixture.drafter(strategy)
        cache = drafter.groups[0].caches[0]
        return cls(drafter, (bits(cache.key), bits(cache.value)))

    def draft(
        self,
        round_: ScheduledRound,
        verified: VerifiedTokens,
        propose: Callable[[VerifiedTokens], Drafts] | None = None,
    ) -> Drafts:
        """Run the round; tables are loaded even if no request joined or left. propose: None for the drafter's."""
        self.drafter.tables.load([[row.pages for row in round_.rows]], [row.limit for row in round_.rows])
        return (propose or self.drafter.propose)(verified)
