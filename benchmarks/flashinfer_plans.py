"""FlashInfer with its own host-side plan, to compare with the plan made on the device.

The plan covers the full width of the block table, which a fixture makes wide enough for the horizon: FlashInfer's
tensor-core kernel is correct for any lengths below the planned ones. No length is read from the device; an engine that
plans for exact lengths also waits for the earlier steps.
"""

from __future__ import annotations

import torch

from attn_backends.flashinfer import FlashInferTensorCores
from builders import AdvanceLevel, AdvanceSupport, AttentionBatch, AttentionSpec
from builders.flashinfer.builder import FlashInferMetadata, TensorCoreBuilder
from builders.flashinfer.wrappers import Kernel


class HorizonBuilder(TensorCoreBuilder):
    """Plans in every build; between builds only last_page_len changes, by one elementwise kernel per step."""

    build_per_round = True

    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(AdvanceLevel.IN_GRAPH, "planned on the host for the horizon, once per round")

    def build(self, batch: AttentionBatch, *, horizon: int = 0) -> FlashInferMetadata:
        metadata = super().build(batch, horizon=horizon)
        if metadata.launch.kernel is Kernel.TENSOR_CORES:
            self.plan(metadata)
            self.advance(metadata)
        return metadata

    def advance(self, metadata: FlashInferMetadata) -> None:
        if metadata.launch.kernel is not Kernel.TENSOR_CORES:
            super().advance(metadata)
            return
        before = (metadata.block_table.shape[1] - 1) * self.spec.page_size
        torch.sub(metadata.seq_lens, before, out=metadata.last_page_len)

    def plan(self, metadata: FlashInferMetadata) -> None:
        """Call FlashInfer's plan() once, for a wrapper over the block table's rows in memory order."""
        indptr = torch.arange(metadata.num_reqs + 1, dtype=torch.int32) * metadata.block_table.shape[1]
        full = torch.full((metadata.num_reqs,), self.spec.page_size, dtype=torch.int32)
        self.wrappers.plan_decode(metadata.launch.wrapper, indptr, full)


class PerStepBuilder(HorizonBuilder):
    """Plans between every two steps."""

    build_per_round = False

    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(AdvanceLevel.REBUILD, "planned on the host in every step")


class FlashInferHorizon(FlashInferTensorCores):
    """One plan per round."""

    name = "flashinfer-horizon"
    builder = HorizonBuilder


class FlashInferPerStep(FlashInferTensorCores):
    """One plan per step."""

    name = "flashinfer-per-step"
    builder = PerStepBuilder
