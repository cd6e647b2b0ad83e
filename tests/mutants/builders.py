"""Builders whose metadata is wrong, or built or refreshed in a forbidden way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, make_dataclass, replace
from typing import Any
from unittest import mock

import torch

from attn_backends import AttentionBackend
from builders import AdvanceLevel, AdvanceSupport, AttentionBatch, AttentionSpec, ReferenceBuilder, ReferenceMetadata
from spec_decode.drafter import Drafter, Drafts, VerifiedTokens
from spec_decode.graphs import CaptureError
from tests.foreseen import Foreseen, ForeseenBuilder
from tests.mutants.attention import RIGHT
from tests.mutants.mutant import (
    Mutant,
    advance,
    around,
    build,
    builder,
    derived,
    freeze,
    lists_pages,
    values_of,
    with_builder,
)
from tests.page_lists import PageListBuilder

REBUILD, ANOTHER = "builder.advance_means_a_rebuild", "builder.advance_refreshes_another_batch"


@advance(REBUILD)
def stale_seq_lens(self: Any, metadata: Any) -> None:
    kept = metadata.kv_end.clone()
    ReferenceBuilder.advance(self, metadata)
    metadata.kv_end.copy_(torch.minimum(kept, metadata.kv_end))


@advance(REBUILD)
def window_not_moved(self: Any, metadata: Any) -> None:
    kept = metadata.kv_start.clone()
    ReferenceBuilder.advance(self, metadata)
    metadata.kv_start.copy_(torch.where(metadata.kv_end > 0, kept, 0))


@advance(ANOTHER)
def increments_its_own_contents(self: Any, metadata: Any) -> None:
    before = metadata.kv_end.clone()
    ReferenceBuilder.advance(self, metadata)
    metadata.kv_end.copy_(torch.where(before > 0, before + 1, 0))


@advance(
    "builder.advance_keeps_addresses",
    not_shown="an advance runs while it is captured, never after: its new memory is the graph's own",
)
def reallocates_in_advance(self: Any, metadata: Any) -> None:
    ReferenceBuilder.advance(self, metadata)
    object.__setattr__(metadata, "kv_end", metadata.kv_end.clone())


@advance("builder.advance_is_device_work", refused=CaptureError)
def reads_the_host_in_advance(self: Any, metadata: Any) -> None:
    if int(metadata.seq_lens.max()) > 0:
        ReferenceBuilder.advance(self, metadata)


@build(RIGHT, cases="page_*")
def off_by_one_slot_at_a_page_edge(self: Any, batch: Any, metadata: Any) -> Any:
    slots, size = batch.slot_mapping, self.spec.page_size
    at_edge = (slots % size == size - 1) & (slots >= 0)
    return replace(metadata, slot_mapping=torch.where(at_edge, slots - 1, slots))


@build("builder.padding_stays_inert")
def padding_writes_slot_0(self: Any, batch: Any, metadata: Any) -> Any:
    return replace(metadata, slot_mapping=batch.slot_mapping.clamp(min=0))


@builder("builder.advance_attends_right", refused=TypeError)
class BakesMaxSeqLen(ReferenceBuilder):
    def build(self, batch: Any, *, horizon: int = 0) -> Any:
        return super().build(replace(batch, max_seq_len=max(batch.host_seq_lens)), horizon=horizon)


@build("builder.build_leaves_the_batch_alone")
def writes_into_the_batch(self: Any, batch: Any, metadata: Any) -> Any:
    batch.seq_lens.clamp_(min=1)
    ReferenceBuilder.advance(self, metadata)
    return metadata


@build(
    "builder.build_reuses_its_addresses",
    not_shown="a group that advances in place is built before the capture, never after",
)
def builds_elsewhere(self: Any, batch: Any, metadata: Any) -> Any:
    self.kept = [*getattr(self, "kept", []), metadata.kv_end.clone()]
    return replace(metadata, kv_end=self.kept[-1])


@lists_pages(ANOTHER, method="counts")
def page_counts_only_grow(self: Any, metadata: Any) -> torch.Tensor:
    return torch.maximum(metadata.page_counts, PageListBuilder.counts(self, metadata))


@lists_pages(ANOTHER, method="pages")
def tail_of_a_list_stays(self: Any, metadata: Any) -> torch.Tensor:
    listed = torch.arange(len(metadata.page_list)) < metadata.page_counts.sum()
    return torch.where(listed, PageListBuilder.pages(self, metadata), metadata.page_list)


@builder("builder.step_fields_are_complete", not_shown="what a builder declares of its fields, no kernel reads")
class UndeclaredStepField(ReferenceBuilder):
    step_fields = ("seq_lens", "positions", "slot_mapping", "kv_start")


@builder("contract.builders_share_no_state")
class BuildersShareBuffers(ReferenceBuilder):
    _pool: Any = None

    def allocate(self) -> None:
        super().allocate()
        type(self)._pool = self._kv_end if type(self)._pool is None else type(self)._pool
        self._kv_end = type(self)._pool


@advance("builder.limits_hold", not_shown="what a request writes past its limit, nobody reads")
def writes_past_its_limit(self: Any, metadata: Any) -> None:
    """A row that became inert continues with the next slot of its pages."""
    ReferenceBuilder.advance(self, metadata)
    position, size = metadata.positions + 1, self.spec.page_size
    column = (position // size).clamp(max=metadata.block_table.shape[1] - 1)
    page = metadata.block_table[metadata.token_to_req, column].long()
    inert = (metadata.slot_mapping < 0) & (page >= 0) & (position > 1)
    metadata.slot_mapping.copy_(torch.where(inert, page * size + position % size, metadata.slot_mapping))


_Thawed = make_dataclass("_Thawed", [(field.name, field.type) for field in fields(ReferenceMetadata)], kw_only=True)


@build("contract.metadata_is_frozen", not_shown="a field could be bound to another tensor, and nobody does it")
def metadata_that_thaws(self: Any, batch: Any, metadata: Any) -> Any:
    return _Thawed(**values_of(metadata))


def counts_live_rows(self: Any, batch: Any, metadata: Any) -> Any:
    """A build that records how many query tokens its live rows have."""
    self.live_at_build = sum(length > 0 for length in batch.host_seq_lens) * batch.max_query_len
    return metadata


@advance("graph.loop_replays_over_other_batches", build=counts_live_rows, refused=TypeError)
def rows_of_its_build(self: Any, metadata: Any) -> None:
    ReferenceBuilder.advance(self, metadata)
    metadata.kv_end[self.live_at_build :] = 0


def _notes_its_size(self: Any, batch: Any, metadata: Any) -> Any:
    if not hasattr(self, "last_tokens"):
        self.last_tokens = torch.zeros((), dtype=torch.int64, device=batch.seq_lens.device)
    self.last_tokens.fill_(batch.num_tokens)
    return metadata


@advance("graph.two_sizes_interleave", build=_notes_its_size)
def rows_of_the_last_build(self: Any, metadata: Any) -> None:
    ReferenceBuilder.advance(self, metadata)
    token = torch.arange(metadata.num_tokens, device=metadata.kv_end.device)
    metadata.kv_end.copy_(torch.where(token < self.last_tokens, metadata.kv_end, 0))


@advance("graph.verify_replays_over_other_batches")
def advances_decodes_only(self: Any, metadata: Any) -> None:
    if metadata.max_query_len == 1:
        ReferenceBuilder.advance(self, metadata)


@advance(
    "graph.ragged_replays_over_other_batches", not_shown="rows of a drafter's step have one number of query tokens"
)
def advances_rows_of_one_length(self: Any, metadata: Any) -> None:
    ReferenceBuilder.advance(self, metadata)
    token = torch.arange(metadata.num_tokens, device=metadata.token_to_req.device)
    metadata.token_to_req.copy_(token // metadata.max_query_len)


@advance("drafter.strategies_agree", cases="k3-n3")
def advance_does_nothing(self: Any, metadata: Any) -> None: ...


kv_end_as_built = Mutant(
    "kv_end_as_built",
    "drafter.steps_attend_to_the_logical_prefix",
    freeze("torch_reference", "kv_end"),
    cases="k4-n3",
)


class _WaitsForLengths(ReferenceBuilder):
    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(AdvanceLevel.REBUILD, "it plans on the host, by lengths that it reads")

    def build(self, batch: Any, *, horizon: int = 0) -> Any:
        self.longest = int(batch.seq_lens.max())
        return super().build(batch, horizon=horizon)


waits_for_lengths = Mutant(
    "waits_for_lengths",
    "drafter.a_round_never_waits",
    with_builder(_WaitsForLengths),
    not_shown="what it waits for is right",
    cases="k4-n3",
)


@around(
    "drafter.drafts_resume_after_a_pause",
    not_shown="its metadata is right: what it describes was never written",
    cases="k4-n3",
)
def leaves_out_rounds_without_drafts(backend: AttentionBackend) -> Iterator[AttentionBackend]:
    """Like engines that skip the drafter when no request wants drafts: the verified tokens' KV is never written."""
    propose = Drafter.propose

    def propose_some(self: Drafter, verified: VerifiedTokens, num_tokens: int | None = None) -> Drafts:
        none = num_tokens == 0 or (verified.draft_lens is not None and not verified.draft_lens.any())
        return self._step.drafts(len(verified.seeds), 0) if none else propose(self, verified, num_tokens)

    with mock.patch.object(Drafter, "propose", propose_some):
        yield backend


def _plan_for_the_present(self: Any, batch: AttentionBatch, *, horizon: int = 0) -> ReferenceMetadata:
    present = replace(batch, host_seq_lens=(*batch.seq_lens.tolist(),))
    return ForeseenBuilder.build(self, present, horizon=horizon)


plans_for_the_present = Mutant(
    "plans_for_the_present",
    "builder.plans_ahead_attend_right",
    type("Shortsighted", (Foreseen,), {"builder": derived("Present", ForeseenBuilder, build=_plan_for_the_present)})(),
)
