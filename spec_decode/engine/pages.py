"""Free pages."""

from __future__ import annotations

from collections.abc import Sequence

from builders.errors import require


class PagePool:
    """Ids of free pages. An id names one page of every KV group of both models: each holds the same tokens of a
    request, over pages of one size, so that one list of ids serves them all."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        require(
            num_pages >= 1 and page_size >= 1,
            f"a pool needs 1 page or more of 1 token or more, got {num_pages} of {page_size}; no request could run. "
            "Raise num_pages or page_size.",
        )
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages))[::-1]

    @property
    def free(self) -> int:
        """How many pages nobody owns."""
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens of one request."""
        return -(-tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        """Own `count` pages; BatchError, with none taken, where fewer are free."""
        require(
            count <= self.free,
            f"{count} pages were asked for and {self.free} of {self.num_pages} are free; none was taken. Free some "
            "first: let a request finish, or preempt one.",
        )
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: Sequence[int]) -> None:
        """Return pages that were taken."""
        self._free += pages
