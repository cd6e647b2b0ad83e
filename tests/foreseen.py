"""A third-party backend whose steps the host can plan ahead, but that cannot advance."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from attn_backends.torch_reference import TorchReference
from builders import (
    AdvanceLevel,
    AdvanceSupport,
    AttentionBatch,
    AttentionSpec,
    CaptureConstants,
    GraphSupport,
    HostLengths,
    MetadataBuilder,
    ReferenceBuilder,
    ReferenceMetadata,
)


class ForeseenBuilder(MetadataBuilder[ReferenceMetadata]):
    """Computes the visible ranges of a decode from the host's lengths, for the requested number of steps."""

    graph_support = GraphSupport.ALWAYS
    host_lengths = HostLengths.EXACT
    step_fields = ("seq_lens", "positions", "slot_mapping", "kv_start", "kv_end")
    builds: ClassVar[list[tuple[int, ...]]] = []

    def __init__(self, spec: AttentionSpec, device: torch.device, **bounds: int) -> None:
        super().__init__(spec, device, **bounds)
        self._inner = ReferenceBuilder(spec, device, **bounds)

    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(AdvanceLevel.PREPLANNED, "its ranges are made on the host")

    def build(self, batch: AttentionBatch, *, horizon: int = 0) -> ReferenceMetadata:
        assert batch.host_seq_lens_exact and batch.host_seq_lens is not None
        metadata = self._inner.build(batch, horizon=horizon)
        if batch.max_query_len == 1:
            self.builds.append(batch.host_seq_lens)
            end = torch.tensor(batch.host_seq_lens, dtype=torch.int32)
            metadata.token_to_req.copy_(torch.arange(batch.num_reqs))
            metadata.kv_end.copy_(end)
            metadata.kv_start.copy_((end - (self.spec.sliding_window or self.max_seq_len)).clamp_(min=0))
        return metadata

    def capture_constants(self, metadata: ReferenceMetadata) -> CaptureConstants:
        return self._inner.capture_constants(metadata)


class Foreseen(TorchReference):
    name = "foreseen"
    builder: Any = ForeseenBuilder
