"""The contract between a metadata builder and the drafter that uses it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, ClassVar, Generic, TypeVar

import torch

from builders.batch import AttentionBatch
from builders.errors import BatchError, require, require_counts
from builders.spec import AttentionSpec

CONTRACT_VERSION = (1, 3)
"""(major, minor). Builders written for another major version are rejected."""

M = TypeVar("M")


class GraphSupport(IntEnum):
    """The widest batch shape whose attention can be captured in a CUDA graph and replayed over other batches."""

    NEVER = 0
    SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


class AdvanceLevel(IntEnum):
    """How metadata moves one token forward, from most work to least.

    PREPLANNED: the host plans every step before the first one runs, with one builder per step. These builds read only
    host_seq_lens, which run ahead of the device's lengths. A row that stops early keeps unused plans.
    """

    REBUILD = 0
    PREPLANNED = 1
    IN_GRAPH = 2


@dataclass(frozen=True, slots=True)
class AdvanceSupport:
    """An advance level, and the reason for it as text."""

    level: AdvanceLevel
    reason: str


class HostLengths(Enum):
    """What `build` needs to know about seq_lens on the host. EXACT costs a device-to-host copy and a sync."""

    NONE = "none"
    UPPER_BOUND = "upper bound"
    EXACT = "exact"


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureConstants:
    """Host values baked into a captured graph. A replayed batch can need less of each, never more."""

    max_reqs: int
    max_query_len: int
    max_seq_len: int

    def exceeded_by(self, needed: CaptureConstants) -> list[str]:
        """Return each constant that `needed` exceeds, as 'name: captured with A, needed B'."""
        pairs = (
            ("max_reqs", self.max_reqs, needed.max_reqs),
            ("max_query_len", self.max_query_len, needed.max_query_len),
            ("max_seq_len", self.max_seq_len, needed.max_seq_len),
        )
        return [f"{name}: captured with {own}, needed {other}" for name, own, other in pairs if other > own]


class MetadataBuilder(ABC, Generic[M]):
    """Builds the metadata that one backend's kernels need for a batch, and updates it in place.

    A builder takes a spec, a device and upper bounds; it needs no engine. `build` returns views of the batch's shared
    state or of the builder's persistent buffers, so a given batch shape always has the same addresses. A graph captured
    with them can therefore be replayed over another batch after `build` or `advance`. Use a builder from one thread: a
    second `build` overwrites the metadata of the first.
    """

    graph_support: ClassVar[GraphSupport]
    host_lengths: ClassVar[HostLengths] = HostLengths.NONE
    step_fields: ClassVar[tuple[str, ...]]
    """Metadata fields that depend on the position; each must be correct after every advance."""
    build_per_round: ClassVar[bool] = False
    """Whether a replay over a new batch needs a `build` at the start of the round."""

    def __init__(
        self, spec: AttentionSpec, device: torch.device, *, max_reqs: int, max_tokens: int, max_seq_len: int
    ) -> None:
        self.spec = spec
        self.device = device
        self.max_reqs = max_reqs
        self.max_tokens = max_tokens
        self.max_seq_len = max_seq_len
        self.allocate()

    def allocate(self) -> None:
        """Allocate the persistent buffers once, for this builder's spec, device and bounds."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        claims = any("advance_support" in base.__dict__ for base in cls.__mro__[1:] if base is not MetadataBuilder)
        if "build" in cls.__dict__ and "advance_support" not in cls.__dict__ and claims:
            cls.advance_support = classmethod(_inherited_advance_support)  # type: ignore[method-assign, assignment]

    @classmethod
    @abstractmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        """Return the advance level for this spec on this device, with its reason."""

    @abstractmethod
    def build(self, batch: AttentionBatch, *, horizon: int = 0) -> M:
        """Build the metadata for any batch within the bounds. It can do host work, and never writes to the batch.

        It does not check the batch's tensors, because it runs every round and `BatchBuffers` makes valid ones. Pass a
        batch that you filled by other means to `check_batch` first.

        horizon: the number of advances before the next build. A request that reaches its limit on the way becomes
        inert. Raises BatchError for an empty batch, and for a horizon beyond the pages of a block-table row.
        """

    def check_horizon(self, batch: AttentionBatch, horizon: int) -> None:
        """Raise BatchError for an empty batch, for one beyond the builder's bounds (its buffers would be too short),
        and for a horizon beyond the pages of a block-table row."""
        if not (batch.num_reqs and batch.num_tokens):
            raise BatchError(
                f"a batch must have a row and a query token, got {batch.num_reqs} and {batch.num_tokens}; kernels "
                "would have nothing to do. Skip the step."
            )
        if batch.num_reqs > self.max_reqs or batch.num_tokens > self.max_tokens or batch.max_seq_len > self.max_seq_len:
            raise BatchError(
                f"this builder has buffers for {self.max_reqs} rows, {self.max_tokens} tokens and lengths up to "
                f"{self.max_seq_len}, got a batch of {batch.num_reqs}, {batch.num_tokens} and up to "
                f"{batch.max_seq_len}; kernels would overrun them. Make a builder with larger bounds."
            )
        capacity = self.row_capacity(batch)
        require_counts("horizons", (horizon,))
        require(
            0 <= horizon < capacity,
            f"horizon must be less than the {capacity} tokens in a request's {batch.block_table.shape[1]} pages, got "
            f"{horizon}; every request would run out of pages. Rebuild sooner, or allocate wider tables.",
        )

    def row_capacity(self, batch: AttentionBatch) -> int:
        """Return how many tokens the pages of a block-table row hold."""
        return batch.block_table.shape[1] * self.spec.page_size

    def advance(self, metadata: M) -> None:
        """Refresh every step field in place from the current shared device state.

        It can be captured: it does device work only, keeps no new allocation, and changes no address and no host field.
        It computes from the shared state (seq_lens, positions, block table), never from the metadata's previous
        contents. A builder that claims REBUILD or PREPLANNED does not define it; calling it then raises BatchError.
        """
        raise BatchError(
            f"a builder must define advance() to advance metadata, {type(self).__name__} does not; it would be stale. "
            "Define it to claim IN_GRAPH, or rebuild for every step."
        )

    @abstractmethod
    def capture_constants(self, metadata: M) -> CaptureConstants:
        """Return the host values baked into a graph captured with this metadata."""


def _inherited_advance_support(
    cls: type[MetadataBuilder[Any]], spec: AttentionSpec, device: torch.device
) -> AdvanceSupport:
    return AdvanceSupport(
        AdvanceLevel.REBUILD,
        f"{cls.__name__} overrides build() but inherits advance; it must define advance_support() again",
    )
