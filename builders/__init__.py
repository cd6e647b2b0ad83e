"""Attention specs, the shared device state of a batch, and the metadata builders that work on it."""

from builders.batch import NO_SLOT, AttentionBatch, BatchBuffers, check_batch
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
from builders.kernels.advance import advance_state
from builders.kernels.set_state import set_decode_state, set_extend_state
from builders.metadata import BatchMetadata, BatchMetadataBuilder
from builders.paged import PagedMetadata, PagedViewBuilder
from builders.spec import AttentionKind, AttentionSpec, SpecError
from builders.state import StateBuilder, StateMetadata
from builders.state_spec import Recurrence, RecurrenceRule, StateSpec
from builders.tables import RequestTables
from builders.torch_reference import ReferenceBuilder, ReferenceMetadata
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
    "BatchMetadata",
    "BatchMetadataBuilder",
    "CaptureConstants",
    "GraphSupport",
    "HostLengths",
    "MetadataBuilder",
    "PagedMetadata",
    "PagedViewBuilder",
    "Recurrence",
    "RecurrenceRule",
    "ReferenceBuilder",
    "ReferenceMetadata",
    "RequestTables",
    "SpecError",
    "StateBuilder",
    "StateMetadata",
    "StateSpec",
    "TritonMlaBuilder",
    "TritonPagedBuilder",
    "advance_state",
    "check_batch",
    "set_decode_state",
    "set_extend_state",
]
