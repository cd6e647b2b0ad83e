"""Who is in each round: requests that join, leave, grow and run into their limit, over pages that change hands."""

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
"""A request's limit lies at most this many whole rounds behind its context."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What a schedule must respect, and the edges that it looks for. window: None without one."""

    max_reqs: int
    steps: int
    max_seq_len: int
    page_size: int
    window: int | None

    @property
    def num_pages(self) -> int:
        """Enough for every request at the longest limit: nobody waits for a page."""
        return self.max_reqs * self.pages_for(self.max_seq_len)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


class Row(NamedTuple):
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
class Round:
    """The live rows in order, who came and went before it, and whether eager drafting must repeat it."""

    index: int
    rows: tuple[Row, ...]
    compared: bool
    joined: int
    left: int
    at_limit: int
    """Those among the left that had no room for another round."""


def drafts_within(limit: int, context: int, accepted: int, steps: int) -> int:
    """Draft tokens that a request has room for; the host's own arithmetic of what the device must find.

    None unless the 1 + steps tokens of step 0 fit. Then step 0 gives one and leaves context + accepted + 1 tokens,
    and every further step needs room for one more.
    """
    return 0 if context + 1 + steps > limit else min(steps, limit - context - accepted)


@dataclass(slots=True, eq=False)
class _Request:
    number: int
    pages: list[int]
    limit: int
    context: int
    temperature: float
    seed: int
    finished: bool = False


class Schedule:
    """An endless series of rounds; a pure function of its arguments."""

    def __init__(self, setting: Setting, *, first: Sequence[int], compare_every: int, seed: int) -> None:
        """first: the number of requests in each of the first rounds, which are all compared; later ones at random."""
        self.setting = setting
        self._first = tuple(first)
        self._compare_every = compare_every
        self._random = random.Random(seed)
        self._free = list(range(setting.num_pages))
        self._random.shuffle(self._free)
        self._live: list[_Request] = []
        self._wanted = 1
        self._requests = 0
        self._rounds = 0

    def __iter__(self) -> Schedule:
        return self

    def __next__(self) -> Round:
        index, starting = self._rounds, self._rounds < len(self._first)
        if starting:
            self._wanted = self._first[index]
        elif self._random.random() < _CROWD_CHANGES:
            self._wanted = self._random.randint(1, self.setting.max_reqs)
        left, at_limit = self._let_leave()
        joined = self._let_join()
        self._rounds += 1
        return Round(
            index=index,
            rows=tuple(self._play(request) for request in self._live),
            compared=starting or self._random.randrange(self._compare_every) == 0,
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

    def _new_request(self) -> _Request:
        setting, draw = self.setting, self._random
        context = self._context()
        limit = context + draw.randint(1, _ROUNDS_ALLOWED * (setting.steps + 1))
        if draw.random() < 0.25:
            limit = setting.pages_for(limit) * setting.page_size
        limit = min(limit, setting.max_seq_len)
        count = setting.pages_for(limit)
        # The pages given back last go out first: most joins take over another's.
        self._free, pages = self._free[:-count], self._free[-count:]
        self._requests += 1
        return _Request(self._requests, pages, limit, context, draw.choice((0.0, 1.0)), draw.getrandbits(62))

    def _context(self) -> int:
        """Half of the time anywhere, else around 0, a page's edge, the window's or the longest limit's."""
        setting, draw = self.setting, self._random
        if draw.random() < 0.5:
            return draw.randrange(setting.max_seq_len)
        pages = setting.pages_for(setting.max_seq_len)
        last = setting.max_seq_len - setting.steps - 1
        edge = draw.choice((0, setting.page_size * draw.randint(1, pages), setting.window or 0, last))
        return min(max(0, edge + draw.randint(-2, 2)), setting.max_seq_len - 1)

    def _play(self, request: _Request) -> Row:
        """The request's row of this round; moves it on. One that gets no draft is finished by it."""
        steps = self.setting.steps
        accepted = self._random.randint(0, steps)
        drafts = drafts_within(request.limit, request.context, accepted, steps)
        row = Row(
            request=request.number,
            pages=request.pages,
            limit=request.limit,
            context=request.context,
            accepted=accepted,
            drafts=drafts,
            temperature=request.temperature,
            seed=request.seed,
        )
        if drafts:
            request.context += accepted + 1
        else:
            request.finished = True
        return row
