"""Allocation of KV pages."""

from __future__ import annotations

from collections.abc import Sequence

from builders.errors import require


class PagePool:
    """Allocates KV pages to requests.

    A page id names one page in every KV group of both models: all groups hold the same tokens of a request in pages of
    the same size, so one list of ids serves them all.
    """

    def __init__(self, num_pages: int, page_size: int, draft_slots: int = 0) -> None:
        """draft_slots: the most KV slots that a step writes past a text's end."""
        self.num_pages = num_pages
        self.page_size = page_size
        self.draft_slots = draft_slots
        self.reset()

    def reset(self) -> None:
        """Take every page back."""
        self._returned: list[int] = []
        self._num_used = 0  # pages 0 .. num_used - 1 were allocated at some time

    @property
    def num_free(self) -> int:
        """Pages that no request owns."""
        return self.num_pages - self._num_used + len(self._returned)

    def slots_for(self, num_tokens: int) -> int:
        """Return the KV slots that a request of this many tokens needs."""
        return num_tokens + self.draft_slots

    def pages_for(self, num_tokens: int) -> int:
        """Return the pages that a request of this many tokens needs."""
        return -(-self.slots_for(num_tokens) // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` pages. Raises BatchError, with none allocated, if fewer are free."""
        require(
            count <= self.num_free,
            f"{count} pages were requested and {self.num_free} of {self.num_pages} are free; none was allocated. Let a "
            "request finish first, or preempt one.",
        )
        returned = [self._returned.pop() for _ in range(min(count, len(self._returned)))]
        first = self._num_used
        self._num_used += count - len(returned)
        return [*returned, *range(first, self._num_used)]

    def free(self, pages: Sequence[int]) -> None:
        """Free allocated pages."""
        self._returned += pages
