"""Third-party backends, each with one claim that a drafter must respect."""

from dataclasses import replace
from typing import ClassVar

import torch

from attn_backends.torch_reference import TorchReference
from attn_backends.triton_paged import TritonPaged
from builders import (
    AdvanceLevel,
    AdvanceSupport,
    GraphSupport,
    HostLengths,
    MetadataBuilder,
    ReferenceBuilder,
    TritonPagedBuilder,
)


class AdvancingBuilder(TritonPagedBuilder):
    """Advances in the graph; counts its builds."""

    builds: ClassVar[list[int]] = []

    @classmethod
    def advance_support(cls, spec, device):
        return AdvanceSupport(AdvanceLevel.IN_GRAPH, "views")

    def build(self, batch, *, horizon=0):
        self.builds.append(batch.max_query_len)
        return super().build(batch, horizon=horizon)


class Advancing(TritonPaged):
    builder = AdvancingBuilder


class RebuiltBuilder(MetadataBuilder):
    """Needs a build with exact lengths in every step; if the drafter calls advance, that is a bug."""

    graph_support = GraphSupport.ALWAYS
    host_lengths = HostLengths.EXACT
    step_fields = ("seq_lens", "kv_end")
    builds: ClassVar[list[int]] = []

    def __init__(self, spec, device, **bounds):
        super().__init__(spec, device, **bounds)
        self._inner = ReferenceBuilder(spec, device, **bounds)

    @classmethod
    def advance_support(cls, spec, device):
        return AdvanceSupport(AdvanceLevel.REBUILD, "its plan is made on the host")

    def build(self, batch, *, horizon=0):
        assert batch.host_seq_lens_exact and list(batch.host_seq_lens) == batch.seq_lens.tolist()
        self.builds.append(batch.max_query_len)
        return self._inner.build(batch, horizon=horizon)

    def capture_constants(self, metadata):
        return self._inner.capture_constants(metadata)


class Rebuilt(TorchReference):
    name = "third_party"
    builder = RebuiltBuilder


class DecodeOnlyBuilder(ReferenceBuilder):
    """Its attention over several tokens per request cannot be captured."""

    graph_support = GraphSupport.SINGLE_TOKEN_DECODE


class DecodeOnly(TorchReference):
    builder = DecodeOnlyBuilder


class UncapturableBuilder(ReferenceBuilder):
    graph_support = GraphSupport.NEVER

    @classmethod
    def advance_support(cls, spec, device):
        return AdvanceSupport(AdvanceLevel.IN_GRAPH, "views")


class Uncapturable(TorchReference):
    """Its attention reads the device, so no graph can hold it; its metadata advances in one."""

    builder = UncapturableBuilder

    def forward(self, query, *args, **options):
        assert query.isfinite().all().item()
        return super().forward(query, *args, **options)


class UncapturableRebuiltBuilder(RebuiltBuilder):
    graph_support = GraphSupport.NEVER


class UncapturableRebuilt(Uncapturable):
    builder = UncapturableRebuiltBuilder


class PlanBuilder(ReferenceBuilder):
    """Plans a round's pages in build (as FlashInfer plans its indices); advance refreshes the rest."""

    build_per_round = True

    def __init__(self, *args, **bounds):
        super().__init__(*args, **bounds)
        self._plan = {}

    @classmethod
    def advance_support(cls, spec, device):
        return AdvanceSupport(AdvanceLevel.IN_GRAPH, "planned for the horizon")

    def build(self, batch, *, horizon=0):
        fresh = torch.empty_like(batch.block_table, memory_format=torch.contiguous_format)
        plan = self._plan.setdefault(batch.num_reqs, fresh)
        plan.copy_(batch.block_table)
        return super().build(replace(batch, block_table=plan), horizon=horizon)


class Planned(TorchReference):
    builder = PlanBuilder


class BoundBuilder(ReferenceBuilder):
    host_lengths = HostLengths.UPPER_BOUND

    @classmethod
    def advance_support(cls, spec, device):
        return AdvanceSupport(AdvanceLevel.IN_GRAPH, "x")

    def build(self, batch, *, horizon=0):
        assert len(batch.host_seq_lens) == batch.num_reqs
        return super().build(batch, horizon=horizon)


class Bound(TorchReference):
    builder = BoundBuilder
