"""Ground floor: specs, the shared state of a batch, and the metadata builders over it."""

from builders.batch import NO_SLOT, AttentionBatch, BatchBuffers
from builders.contract import (
    CONTRACT_VERSION,
    AdvanceLevel,
    AdvanceSupport,
    CaptureConstants,
    GraphSupport,
    HostLengths,
    MetadataBuilder,
)
from builders.errors import BatchError
from builders.flash_attn3 import FlashAttn3Builder
from builders.kernels.advance import advance_shared_state
from builders.kernels.begin_round import begin_decode, begin_extend
from builders.paged import PagedMetadata, PagedViewBuilder
from builders.reference import ReferenceBuilder, ReferenceMetadata
from builders.sparse_window import SparseSwaBuilder, SparseSwaMetadata
from builders.spec import AttentionKind, AttentionSpec, SpecError
from builders.tables import RequestTables
from builders.triton_mla import TritonMlaBuilder
from builders.triton_paged import TritonPagedBuilder

__all__ = [
    "CONTRACT_VERSION",
    "NO_SLOT",
    "AdvanceLevel",
    "AdvanceSupport",
    "AttentionBatch",
    "AttentionKind",
    "AttentionSpec",
    "BatchBuffers",
    "BatchError",
    "CaptureConstants",
    "FlashAttn3Builder",
    "GraphSupport",
    "HostLengths",
    "MetadataBuilder",
    "PagedMetadata",
    "PagedViewBuilder",
    "ReferenceBuilder",
    "ReferenceMetadata",
    "RequestTables",
    "SparseSwaBuilder",
    "SparseSwaMetadata",
    "SpecError",
    "TritonMlaBuilder",
    "TritonPagedBuilder",
    "advance_shared_state",
    "begin_decode",
    "begin_extend",
]
