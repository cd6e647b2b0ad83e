"""Which pages each query token sees: listed at build, and listed again after every step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from builders import (
    AdvanceLevel,
    AdvanceSupport,
    AttentionBatch,
    AttentionSpec,
    CaptureConstants,
    GraphSupport,
    MetadataBuilder,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowMetadata:
    """For each query token t: pages[t] are the pages that it reads, in order, each with page_size tokens. Of all these
    tokens, t skips the first skip[t] and sees the next seen[t]. Unused entries of pages[t] are 0.

    query_start_loc int32 [num_reqs + 1], seq_lens int32 [num_reqs], positions int64 [num_tokens],
    block_table int32 [num_reqs, max_pages], slot_mapping int64 [num_tokens]: views of the batch.
    pages int32 [num_tokens, width], skip int32 [num_tokens], seen int32 [num_tokens]: the builder's own buffers.
    """

    num_reqs: int
    num_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    positions: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    pages: torch.Tensor
    skip: torch.Tensor
    seen: torch.Tensor


class WindowPagesBuilder(MetadataBuilder[WindowMetadata]):
    """Lists, for each query token, the pages between the start of its window and itself."""

    graph_support = GraphSupport.ALWAYS
    step_fields = ("seq_lens", "positions", "slot_mapping", "pages", "skip", "seen")

    def allocate(self) -> None:
        self.pages = torch.zeros(self.max_tokens, self._width(), dtype=torch.int32, device=self.device)
        self.skip = torch.zeros(self.max_tokens, dtype=torch.int32, device=self.device)
        self.seen = torch.zeros(self.max_tokens, dtype=torch.int32, device=self.device)

    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(AdvanceLevel.IN_GRAPH, "page lists and counts are computed on the device from positions")

    def build(self, batch: AttentionBatch, *, horizon: int = 0) -> WindowMetadata:
        self.check_horizon(batch, horizon)
        metadata = WindowMetadata(
            num_reqs=batch.num_reqs,
            num_tokens=batch.num_tokens,
            max_query_len=batch.max_query_len,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            positions=batch.positions,
            block_table=batch.block_table,
            slot_mapping=batch.slot_mapping,
            pages=self.pages[: batch.num_tokens],
            skip=self.skip[: batch.num_tokens],
            seen=self.seen[: batch.num_tokens],
        )
        self._list_pages(metadata)
        self._count_tokens(metadata)
        return metadata

    def advance(self, metadata: WindowMetadata) -> None:
        self._list_pages(metadata)
        self._count_tokens(metadata)

    def capture_constants(self, metadata: WindowMetadata) -> CaptureConstants:
        return CaptureConstants(
            max_reqs=metadata.num_reqs, max_query_len=metadata.max_query_len, max_seq_len=self.max_seq_len
        )

    def _width(self) -> int:
        """The most pages that one token can see. Its window may begin anywhere in a page."""
        size, window = self.spec.page_size, self.spec.sliding_window
        whole = -(-self.max_seq_len // size)
        return whole if window is None else min(whole, -(-(window - 1) // size) + 1)

    def _list_pages(self, metadata: WindowMetadata) -> None:
        row, start, end = self._ranges(metadata)
        size, table = self.spec.page_size, metadata.block_table
        column = (start // size)[:, None] + torch.arange(metadata.pages.shape[1], device=table.device)
        listed = table[row[:, None], column.clamp(max=table.shape[1] - 1)]
        metadata.pages.copy_(torch.where(column * size < end[:, None], listed, 0))

    def _count_tokens(self, metadata: WindowMetadata) -> None:
        _, start, end = self._ranges(metadata)
        metadata.skip.copy_(start % self.spec.page_size)
        metadata.seen.copy_(end - start)

    def _ranges(self, metadata: WindowMetadata) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Each query token's row, and the positions that it sees: start to end - 1. In padding, start and end are 0."""
        starts = metadata.query_start_loc
        token = torch.arange(metadata.num_tokens, dtype=starts.dtype, device=starts.device)
        row = torch.searchsorted(starts[1:], token, right=True).clamp(max=metadata.num_reqs - 1)
        live = (metadata.seq_lens[row] > 0) & (token < starts[-1])
        end = torch.where(live, metadata.positions + 1, 0)
        window = self.spec.sliding_window
        start = torch.zeros_like(end) if window is None else (end - window).clamp(min=0)
        return row, start, end
