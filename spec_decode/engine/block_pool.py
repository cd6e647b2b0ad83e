"""Allocation of KV pages."""

from __future__ import annotations

from collections.abc import Sequence

from builders.errors import require


class BlockPool:
    """Allocates KV pages to requests.

    A page id names one page of every KV group of both models: all groups hold the same tokens of a request, in pages of
    one size, so that one list of ids serves them all.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.reset()

    def reset(self) -> None:
        """Take every page back, whoever has it."""
        self._free = list(range(self.num_pages))[::-1]

    @property
    def num_free(self) -> int:
        """Pages that no request owns."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold this many tokens of one request."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages. Raises BatchError, with none taken, when fewer are free."""
        require(
            count <= self.num_free,
            f"{count} pages were asked for and {self.num_free} of {self.num_pages} are free; none was taken. Free some "
            "first: let a request finish, or preempt one.",
        )
        return [self._free.pop() for _ in range(count)]

    def free(self, pages: Sequence[int]) -> None:
        """Return pages that were allocated."""
        self._free += pages
