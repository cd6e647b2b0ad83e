"""The contract between a metadata builder and whoever drafts with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, ClassVar, Generic, TypeVar

import torch

from builders.batch import AttentionBatch
from builders.errors import BatchError, require, require_counts
from builders.spec import AttentionSpec

CONTRACT_VERSION = (1, 2)
"""Major, minor. A builder written for another major version is refused."""

M = TypeVar("M")


class GraphSupport(IntEnum):
    """The widest batch shape whose attention can be captured and replayed over other batches."""

    NEVER = 0
    SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


class AdvanceLevel(IntEnum):
    """How metadata moves one token forward, from most work to least.

    PREPLANNED: the host plans every step before the first one runs, with a builder for each step. Such a build reads
    lengths from host_seq_lens only, which are then ahead of the device's. A row that stops early has a plan for tokens
    that it will not get.
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
    """What `build` must know about seq_lens on the host. EXACT costs a copy from the device and a wait."""

    NONE = "none"
    UPPER_BOUND = "upper bound"
    EXACT = "exact"


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureConstants:
    """Host values that a captured graph holds. A replay may need less of each, never more."""

    max_reqs: int
    max_query_len: int
    max_seq_len: int

    def exceeded_by(self, needed: CaptureConstants) -> list[str]:
        """Each constant that `needed` exceeds, as 'name: captured with A, needed B'."""
        pairs = (
            ("max_reqs", self.max_reqs, needed.max_reqs),
            ("max_query_len", self.max_query_len, needed.max_query_len),
            ("max_seq_len", self.max_seq_len, needed.max_seq_len),
        )
        return [f"{name}: captured with {ours}, needed {theirs}" for name, ours, theirs in pairs if theirs > ours]


class MetadataBuilder(ABC, Generic[M]):
    """Builds the metadata that one backend's kernels need for a batch, and keeps it current in place.

    It is made from a spec, a device and bounds, and needs no engine. Tensors that `build` returns are views of the
    batch's shared state or persistent buffers of the builder, so the same batch shape always has the same addresses.
    A graph captured with them can therefore be replayed over another batch after `build` or `advance`. Use a builder
    from one thread: a second `build` overwrites the metadata of the first.
    """

    graph_support: ClassVar[GraphSupport]
    host_lengths: ClassVar[HostLengths] = HostLengths.NONE
    step_fields: ClassVar[tuple[str, ...]]
    """Metadata fields whose content depends on the position; each must be right after every advance."""
    build_per_round: ClassVar[bool] = False
    """Whether a replay over a new batch is right only after a `build` at the start of the round."""

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
        """Allocate the persistent buffers, once, for the spec, the device and the bounds of this builder."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        claims = any("advance_support" in base.__dict__ for base in cls.__mro__[1:] if base is not MetadataBuilder)
        if "build" in cls.__dict__ and "advance_support" not in cls.__dict__ and claims:
            cls.advance_support = classmethod(_restate_the_claim)  # type: ignore[method-assign, assignment]

    @classmethod
    @abstractmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        """The advance level for this spec on this device, with its reason."""

    @abstractmethod
    def build(self, batch: AttentionBatch, *, horizon: int = 0) -> M:
        """Metadata for any batch within the bounds. It may work on the host, and never writes to the batch.

        It does not check the batch's tensors, because it runs every round and `BatchBuffers` makes valid ones. Give a
        batch that you fill by other means to `check_batch` first.

        horizon: how many advances follow before the next build. A request that reaches its own limit on the way becomes
        inert. Raises BatchError for an empty batch, and for a horizon beyond the pages that a row of the block table
        has room for.
        """

    def check_horizon(self, batch: AttentionBatch, horizon: int) -> None:
        """Raise BatchError for an empty batch, for one beyond the builder's bounds, whose buffers would be too short
        for it, and for a horizon beyond the pages that a row of the block table has room for.
        """
        if not (batch.num_reqs and batch.num_tokens):
            raise BatchError(
                f"a batch must have a row and a query token, got {batch.num_reqs} and {batch.num_tokens}; no kernel "
                "has anything to do. Leave the step out."
            )
        if batch.num_reqs > self.max_reqs or batch.num_tokens > self.max_tokens or batch.max_seq_len > self.max_seq_len:
            raise BatchError(
                f"this builder has buffers for {self.max_reqs} rows, {self.max_tokens} tokens and lengths up to "
                f"{self.max_seq_len}, got a batch of {batch.num_reqs}, {batch.num_tokens} and up to "
                f"{batch.max_seq_len}; a kernel would leave them. Make one for larger bounds."
            )
        capacity = batch.block_table.shape[1] * self.spec.page_size
        require_counts("horizons", (horizon,))
        require(
            0 <= horizon < capacity,
            f"a horizon must be 0 to {capacity - 1}, the tokens of the {batch.block_table.shape[1]} pages of a row but "
            f"one, got {horizon}; every request would leave its pages on the way. Build again "
            "sooner, or allocate wider tables.",
        )

    def advance(self, metadata: M) -> None:
        """Refresh every step field in place from the shared device state as it stands now.

        A graph can hold it: it does device work only, keeps no new allocation, and changes no address and no host
        field. It computes from the shared state (seq_lens, positions, block table), never from the metadata's earlier
        contents. A builder that claims REBUILD or PREPLANNED does not define it; calling it then raises BatchError.
        """
        raise BatchError(
            f"metadata advances only by a builder that defines advance(), {type(self).__name__} does not; it would be "
            "stale. Define it for a claim of IN_GRAPH, or build again for every step."
        )

    @abstractmethod
    def capture_constants(self, metadata: M) -> CaptureConstants:
        """The host values that a graph captured with this metadata holds."""


def _restate_the_claim(cls: type[MetadataBuilder[Any]], spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
    return AdvanceSupport(
        AdvanceLevel.REBUILD,
        f"{cls.__name__} overrides build() and inherits its advance; it must state advance_support() again",
    )
