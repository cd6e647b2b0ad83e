"""The requests of each round: they join, leave, grow and reach their limit, over pages that change owners."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_LEAVES = 1 / 32
"""Chance of a request to leave in a round before its limit."""
_CROWD_CHANGES = 1 / 16
"""Chance of a round to want another number of requests."""
_ROUNDS_ALLOWED = 12
"""A request's limit lies at most this many whole rounds after its context."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleLimits:
    """What a schedule must respect, and the edges that it looks for. window: None without one."""

    max_reqs: int
    num_speculative_tokens: int
    max_seq_len: int
    page_size: int
    window: int | None

    @property
    def num_pages(self) -> int:
        """Enough for every request at the longest limit: nobody waits for a page."""
        return self.max_reqs * self.pages_for(self.max_seq_len)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


class ScheduledRequest(NamedTuple):
    """A request as one round sees it.

    context: draft KV tokens it has; accepted: how many of its last drafts were kept; drafts: tokens it must get.
    """

    request: int
    pages: list[int]
    limit: int
    context: int
    accepted: int
    drafts: int
    temperature: float
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledRound:
    """The live rows in order, who came and went before it, and whether eager drafting must repeat it."""

    index: int
    rows: tuple[ScheduledRequest, ...]
    compared: bool
    joined: int
    left: int
    at_limit: int
    """Those among the left that had no room for another round."""


def drafts_within(limit: int, context: int, accepted: int, k: int) -> int:
    """Draft tokens that a request has room for in a round of k, computed on the host.

    None unless the 1 + k tokens of step 0 fit. Then step 0 gives one and leaves context + accepted + 1 tokens, and
    every further step needs room for one more.
    """
    return 0 if context + 1 + k > limit else min(k, limit - context - accepted)


@dataclass(slots=True, eq=False)
class _LiveRequest:
    number: int
    pages: list[int]
    limit: int
    context: int
    temperature: float
    seed: int
    finished: bool = False


class Schedule:
    """An endless series of rounds; a pure function of its arguments."""

    def __init__(self, limits: ScheduleLimits, *, first: Sequence[int], compare_every: int, seed: int) -> None:
        """first: the number of requests in each of the first rounds, which are all compared. Later ones are at random:
        one of every compare_every in a row is compared.
        """
        self.limits = limits
        self._first = tuple(first)
        self._compare_every, self._next_compared = compare_every, 0
        self._random = random.Random(seed)
        self._free = list(range(limits.num_pages))
        self._random.shuffle(self._free)
        self._live: list[_LiveRequest] = []
        self._wanted = 1
        self._requests = 0
        self._rounds = 0

    def __iter__(self) -> Schedule:
        return self

    def __next__(self) -> ScheduledRound:
        index, starting = self._rounds, self._rounds < len(self._first)
        if starting:
            self._wanted = self._first[index]
        elif self._random.random() < _CROWD_CHANGES:
            self._wanted = self._random.randint(1, self.limits.max_reqs)
        if index % self._compare_every == 0:
            self._next_compared = index + self._random.randrange(self._compare_every)
        left, at_limit = self._let_leave()
        joined = self._let_join()
        self._rounds += 1
        return ScheduledRound(
            index=index,
            rows=tuple(self._scheduled(request) for request in self._live),
            compared=starting or index == self._next_compared,
            joined=joined,
            left=left,
            at_limit=at_limit,
        )

    def _let_leave(self) -> tuple[int, int]:
        """Give back the pages of who is finished, of some others, and of who is too many."""
        before, finished = len(self._live), sum(request.finished for request in self._live)
        staying = [request for request in self._live if not request.finished and self._random.random() >= _LEAVES]
        for _ in range(len(staying) - self._wanted):
            staying.pop(self._random.randrange(len(staying)))
        for request in self._live:
            if request not in staying:
                self._free += request.pages
        self._live = staying
        return before - len(staying), finished

    def _let_join(self) -> int:
        joined = self._wanted - len(self._live)
        for _ in range(joined):
            # Anywhere, so that the others change rows too.
            self._live.insert(self._random.randint(0, len(self._live)), self._new_request())
        return joined

    def _new_request(self) -> _LiveRequest:
        limits, draw = self.limits, self._random
        context = self._context()
        limit = context + draw.randint(1, _ROUNDS_ALLOWED * (limits.num_speculative_tokens + 1))
        if draw.random() < 0.25:
            limit = limits.pages_for(limit) * limits.page_size
        limit = min(limit, limits.max_seq_len)
        count = limits.pages_for(limit)
        # The pages given back last go out first: most joins take over another's.
        self._free, pages = self._free[:-count], self._free[-count:]
        self._requests += 1
        return _LiveRequest(self._requests, pages, limit, context, draw.choice((0.0, 1.0)), draw.getrandbits(62))

    def _context(self) -> int:
        """Half of the time anywhere, else around 0, a page's edge, the window's or the longest limit's."""
        limits, draw = self.limits, self._random
        if draw.random() < 0.5:
            return draw.randrange(limits.max_seq_len)
        pages = limits.pages_for(limits.max_seq_len)
        last = limits.max_seq_len - limits.num_speculative_tokens - 1
        edge = draw.choice((0, limits.page_size * draw.randint(1, pages), limits.window or 0, last))
        return min(max(0, edge + draw.randint(-2, 2)), limits.max_seq_len - 1)

    def _scheduled(self, live: _LiveRequest) -> ScheduledRequest:
        """The request's row of this round; moves it on. One that gets no draft is finished by it."""
        k = self.limits.num_speculative_tokens
        accepted = self._random.randint(0, k)
        drafts = drafts_within(live.limit, live.context, accepted, k)
        row = ScheduledRequest(
            live.number, live.pages, live.limit, live.context, accepted, drafts, live.temperature, live.seed
        )
        if drafts:
            live.context += accepted + 1
        else:
            live.finished = True
        return row
