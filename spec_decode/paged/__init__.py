"""Running a model over paged KV caches: its KV groups, their metadata, and step buffers for one batch shape."""

from spec_decode.paged.attention import PagedAttention
from spec_decode.paged.kv_groups import BackendChoice, KVGroup, build_ragged, make_group, make_groups
from spec_decode.paged.metadata_plan import (
    GraphMode,
    GroupFacts,
    GroupPlan,
    MetadataPlan,
    MetadataUpdate,
    plan_uniform_step,
)
from spec_decode.paged.state_group import StateGroup
from spec_decode.paged.step_metadata import StepBuffers

__all__ = [
    "BackendChoice",
    "GraphMode",
    "GroupFacts",
    "GroupPlan",
    "KVGroup",
    "MetadataPlan",
    "MetadataUpdate",
    "PagedAttention",
    "StateGroup",
    "StepBuffers",
    "build_ragged",
    "make_group",
    "make_groups",
    "plan_uniform_step",
]
