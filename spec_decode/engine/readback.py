"""Results on their way from the device to the host."""

from __future__ import annotations

import torch


class AsyncOutput:
    """A copy of a small tensor as it stands in the stream's order now. Only `read` waits for it."""

    def __init__(self, source: torch.Tensor) -> None:
        self._event = torch.cuda.Event() if source.is_cuda else None
        # To the host without waiting means to pinned memory.
        self._copy = source.to("cpu", non_blocking=True, copy=True)
        if self._event:
            self._event.record()

    def read(self) -> list[list[int]]:
        """The values, row by row."""
        if self._event:
            self._event.synchronize()
        rows: list[list[int]] = self._copy.tolist()
        return rows
