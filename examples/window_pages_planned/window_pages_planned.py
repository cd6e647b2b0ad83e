"""Page lists planned on the host: each later step has its own builder, and every `build` runs before step 1."""

from __future__ import annotations

import torch
from window_pages.backend import WindowPages
from window_pages.builder import WindowMetadata, WindowPagesBuilder

from builders import AdvanceLevel, AdvanceSupport, AttentionBatch, AttentionSpec, HostLengths


class PlannedBuilder(WindowPagesBuilder):
    """Computes from host lengths only. When it builds for a later step, the device still has the lengths of step 0."""

    host_lengths = HostLengths.EXACT

    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(AdvanceLevel.PREPLANNED, "what each token sees is worked out on the host")

    def build(self, batch: AttentionBatch, *, horizon: int = 0) -> WindowMetadata:
        assert batch.host_seq_lens is not None and batch.host_query_lens is not None
        rows, ends = [0] * batch.num_tokens, [0] * batch.num_tokens  # a padding token sees nothing: its end is 0
        token = 0
        for row, (seq_len, query_len) in enumerate(zip(batch.host_seq_lens, batch.host_query_lens, strict=True)):
            for place in range(query_len):
                rows[token] = row
                ends[token] = max(seq_len - query_len + place + 1, 0) if seq_len else 0
                token += 1
        self._plan = torch.tensor([rows, ends]).to(self.device)
        return super().build(batch, horizon=horizon)

    def _ranges(self, metadata: WindowMetadata) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        row, end = self._plan
        window = self.spec.sliding_window
        start = torch.zeros_like(end) if window is None else (end - window).clamp(min=0)
        return row, start, end


class WindowPagesPlanned(WindowPages):
    name = "window_pages_planned"
    builder = PlannedBuilder
