"""The reference builder plus a flat list of each request's pages, as gathering kernels need it."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from attn_backends.torch_reference import TorchReference
from builders import (
    AdvanceLevel,
    AdvanceSupport,
    AttentionBatch,
    AttentionSpec,
    CaptureConstants,
    GraphSupport,
    MetadataBuilder,
    ReferenceBuilder,
    ReferenceMetadata,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PageListMetadata(ReferenceMetadata):
    """page_counts int32 [num_reqs]; page_list int32 [num_reqs * width], all requests' pages, then zeros."""

    page_counts: torch.Tensor
    page_list: torch.Tensor


class PageListBuilder(MetadataBuilder[PageListMetadata]):
    """Lists pages correctly in build() and, unless a subclass changes it, in advance()."""

    graph_support = GraphSupport.ALWAYS
    step_fields = (*ReferenceBuilder.step_fields, "page_counts", "page_list")

    def __init__(self, spec: AttentionSpec, device: torch.device, **bounds: int) -> None:
        super().__init__(spec, device, **bounds)
        self._inner = ReferenceBuilder(spec, device, **bounds)
        self._width = -(-self.max_seq_len // spec.page_size)
        self._counts = torch.zeros(self.max_reqs, dtype=torch.int32, device=device)
        self._pages = torch.zeros(self.max_reqs * self._width, dtype=torch.int32, device=device)

    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(AdvanceLevel.IN_GRAPH, "pages are counted and listed on the device")

    def build(self, batch: AttentionBatch, *, horizon: int = 0) -> PageListMetadata:
        inner = self._inner.build(batch, horizon=horizon)
        metadata = PageListMetadata(
            **{field.name: getattr(inner, field.name) for field in fields(inner)},
            page_counts=self._counts[: batch.num_reqs],
            page_list=self._pages[: batch.num_reqs * self._width],
        )
        metadata.page_counts.copy_(PageListBuilder.counts(self, metadata))
        metadata.page_list.copy_(PageListBuilder.pages(self, metadata))
        return metadata

    def advance(self, metadata: PageListMetadata) -> None:
        self._inner.advance(metadata)
        metadata.page_counts.copy_(self.counts(metadata))
        metadata.page_list.copy_(self.pages(metadata))

    def capture_constants(self, metadata: PageListMetadata) -> CaptureConstants:
        return self._inner.capture_constants(metadata)

    def counts(self, metadata: PageListMetadata) -> torch.Tensor:
        size = self.spec.page_size
        return (metadata.seq_lens + size - 1) // size

    def pages(self, metadata: PageListMetadata) -> torch.Tensor:
        place, table = torch.arange(len(metadata.page_list)), metadata.block_table
        ends = metadata.page_counts.cumsum(0)
        row = torch.searchsorted(ends, place, right=True).clamp_(max=metadata.num_reqs - 1)
        column = (place - (ends - metadata.page_counts)[row]).clamp_(0, table.shape[1] - 1)
        return torch.where(place < ends[-1], table[row, column], 0)


class PageLists(TorchReference):
    name = "page_lists"
    builder = PageListBuilder
