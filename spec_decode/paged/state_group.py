"""A state group of a model: recurrent layers that share a backend, a spec and a slot per request."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_backends import StateBackend, StateCache, StateLengths
from builders import RequestTables, StateBuilder, StateMetadata, StateSpec
from spec_decode.paged.metadata_plan import GroupFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class StateGroup:
    """One group: group i of a model uses block table i of its RequestTables. A page of it never ends: each request has
    one, its slot."""

    name: str
    backend: StateBackend
    spec: StateSpec
    caches: dict[int, StateCache]
    """Layer index -> cache. All share their lengths."""

    @property
    def lengths(self) -> StateLengths:
        return next(iter(self.caches.values())).lengths

    @property
    def num_pages(self) -> int:
        """Slots."""
        return len(self.lengths.base)

    def facts(self, device: torch.device) -> GroupFacts:
        """Return what the choice of a strategy depends on."""
        return GroupFacts.of(self.name, self.backend, self.spec, device)

    def make_builder(self, tables: RequestTables, max_tokens: int) -> StateBuilder:
        """Make a builder for one batch shape over these tables."""
        return self.backend.builder(
            self.spec, tables.device, max_reqs=tables.max_reqs, max_tokens=max_tokens, max_seq_len=tables.max_seq_len
        )

    def begin(self, slots: torch.Tensor) -> None:
        """Let requests begin in these slots, int32 [n]: a state that was lost there was another's."""
        self.lengths.lost.index_fill_(0, slots.long(), 0)

    def end_step(self, metadata: StateMetadata) -> None:
        """Count the tokens of a step, after the forward of all layers. It can be captured."""
        self.backend.end_step(self.lengths, metadata, spec=self.spec)

    def move_accepted(self, metadata: StateMetadata, path: torch.Tensor) -> None:
        """Keep a verified tree's accepted path, int64 [size, K]; see `StateBackend.move_accepted`."""
        self.backend.move_accepted(list(self.caches.values()), metadata, path, spec=self.spec)
