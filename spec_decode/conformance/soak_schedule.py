"""The requests of each round: they join, leave, grow and reach their limit, over pages that change owners."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_LEAVES = 1 / 32
"""Probability that a request leaves in a round before its limit."""
_CROWD_CHANGES = 1 / 16
"""Probability that a round changes the number of requests."""
_ROUNDS_ALLOWED = 12
"""A request's limit is at most this many whole rounds after its context."""


class ScheduledRequest(NamedTuple):
    """A request as one round sees it.

    context: its draft KV tokens; accepted: how many of its last drafts were kept; drafts: tokens it must get. A request
    that gets none leaves.
    """

    request: int
    pages: list[int]
    limit: int
    context: int
    temperature: float
    seed: int
    accepted: int = 0
    drafts: int = 0


@dataclass(frozen=True, slots=True)
class ScheduledRound:
    """The live rows in order, how many joined and left before it, and whether eager drafting must repeat it.

    at_limit: how many of those that left had no room for another round.
    """

    index: int
    rows: Sequence[ScheduledRequest]
    compared: bool
    joined: int
    left: int
    at_limit: int


def drafts_within(limit: int, context: int, accepted: int, k: int) -> int:
    """Compute on the host how many draft tokens a request has room for in a round of k.

    Zero unless the 1 + k tokens of step 0 fit. Step 0 then gives one and leaves context + accepted + 1 tokens; every
    further step needs room for one more.
    """
    return 0 if context + 1 + k > limit else min(k, limit - context - accepted)


@dataclass(kw_only=True, eq=False)
class Schedule:
    """An endless series of rounds; a pure function of its arguments.

    first: the number of requests in each of the first rounds, which are all compared. Later numbers are random, and one
    of every compare_every rounds is compared. window: None without one.
    """

    max_reqs: int
    num_speculative_tokens: int
    max_seq_len: int
    page_size: int
    window: int | None
    first: Sequence[int]
    compare_every: int
    seed: int

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        # Enough for every request at the longest limit: no request waits for a page.
        self._free = list(range(self.max_reqs * self._pages_for(self.max_seq_len)))
        self._random.shuffle(self._free)
        self._live: list[ScheduledRequest] = []
        self._wanted = 1
        self._requests = self._rounds = self._next_compared = 0

    def __iter__(self) -> Schedule:
        return self

    def __next__(self) -> ScheduledRound:
        index, starting = self._rounds, self._rounds < len(self.first)
        if starting:
            self._wanted = self.first[index]
        elif self._random.random() < _CROWD_CHANGES:
            self._wanted = self._random.randint(1, self.max_reqs)
        if index % self.compare_every == 0:
            self._next_compared = index + self._random.randrange(self.compare_every)
        before, at_limit = len(self._live), sum(not row.drafts for row in self._live)
        staying = self._remove_leaving()
        joined = self._wanted - len(staying)
        rows = [row._replace(context=row.context + row.accepted + 1) for row in staying]
        for _ in range(joined):
            # At a random row, so that the others change rows too.
            rows.insert(self._random.randint(0, len(rows)), self._new_request())
        self._live = [self._with_drafts(row) for row in rows]
        self._rounds += 1
        compared = starting or index == self._next_compared
        return ScheduledRound(index, self._live, compared, joined, before - len(staying), at_limit)

    def _remove_leaving(self) -> list[ScheduledRequest]:
        """Remove requests that are finished, some others, and any surplus, and free their pages; return the others."""
        staying = [row for row in self._live if row.drafts and self._random.random() >= _LEAVES]
        for _ in range(len(staying) - self._wanted):
            staying.pop(self._random.randrange(len(staying)))
        for row in self._live:
            if row not in staying:
                self._free += row.pages
        return staying

    def _new_request(self) -> ScheduledRequest:
        draw, context = self._random, self._context()
        limit = context + draw.randint(1, _ROUNDS_ALLOWED * (self.num_speculative_tokens + 1))
        if draw.random() < 0.25:
            limit = self._pages_for(limit) * self.page_size
        limit = min(limit, self.max_seq_len)
        count = self._pages_for(limit)
        # Pages freed last are reused first: most new requests take over another's.
        self._free, pages = self._free[:-count], self._free[-count:]
        self._requests += 1
        return ScheduledRequest(self._requests, pages, limit, context, draw.choice((0.0, 1.0)), draw.getrandbits(62))

    def _context(self) -> int:
        """Half of the time anywhere, else close to 0, a page's edge, the window's or the longest limit's."""
        draw = self._random
        if draw.random() < 0.5:
            return draw.randrange(self.max_seq_len)
        last = self.max_seq_len - self.num_speculative_tokens - 1
        page_edge = self.page_size * draw.randint(1, self._pages_for(self.max_seq_len))
        edge = draw.choice((0, page_edge, self.window or 0, last))
        return min(max(0, edge + draw.randint(-2, 2)), self.max_seq_len - 1)

    def _with_drafts(self, row: ScheduledRequest) -> ScheduledRequest:
        """Return the row with what this round accepts and drafts for it."""
        accepted = self._random.randint(0, self.num_speculative_tokens)
        drafts = drafts_within(row.limit, row.context, accepted, self.num_speculative_tokens)
        return row._replace(accepted=accepted, drafts=drafts)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
