"""A wrong claim: an advance that saves work by leaving one step field as it was built."""

from __future__ import annotations

from window_pages.backend import WindowPages
from window_pages.builder import WindowMetadata, WindowPagesBuilder


class ThriftyBuilder(WindowPagesBuilder):
    """Still claims an advance in the graph, which is no longer true."""

    def advance(self, metadata: WindowMetadata) -> None:
        """Wrong: leaves the page lists as they are, because few steps reach a new page. Some do."""
        self._count_tokens(metadata)


class WindowPagesLiar(WindowPages):
    name = "window_pages_liar"
    builder = ThriftyBuilder
