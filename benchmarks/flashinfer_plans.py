"""FlashInfer with a plan made by itself on the host, to compare with the plan that the device makes.

The plan is for the block table's whole width, which a fixture makes as wide as the horizon needs: FlashInfer's kernel
on tensor cores is right for any lengths below those of its plan. No length is read from the device; an engine that
plans for exact ones waits for the earlier steps as well.
"""

from __future__ import annotations

import torch

from attn_backends.flashinfer import FlashInferTensorCores
from builders import AdvanceLevel, AdvanceSupport, AttentionBatch, AttentionSpec
from builders.flashinfer.builder import FlashInferMetadata, TensorCoreBuilder
from builders.flashinfer.wrappers import Kernel


class HorizonBuilder(TensorCoreBuilder):
    """Plans in every build; under that plan only last_page_len moves, by one elementwise kernel a step."""

    build_per_round = True

    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(AdvanceLevel.IN_GRAPH, "planned on the host for the horizon, once a round")

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
        """One call of FlashInfer's plan(), of a wrapper over the rows of the block table as they lie."""
        indptr = torch.arange(metadata.num_reqs + 1, dtype=torch.int32) * metadata.block_table.shape[1]
        full = torch.full((metadata.num_reqs,), self.spec.page_size, dtype=torch.int32)
        self.wrappers.plan_decode(metadata.launch.wrapper, indptr, full)


class PerStepBuilder(HorizonBuilder):
    """Plans between any two steps."""

    build_per_round = False

    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(AdvanceLevel.REBUILD, "planned on the host at every step")


class FlashInferHorizon(FlashInferTensorCores):
    """A plan a round."""

    name = "flashinfer-horizon"
    builder = HorizonBuilder


class FlashInferPerStep(FlashInferTensorCores):
    """A plan a step."""

    name = "flashinfer-per-step"
    builder = PerStepBuilder
