"""Builders whose metadata is wrong, or made or refreshed in a way that they must not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, make_dataclass, replace
from typing import Any
from unittest import mock

import torch

from attn_backends import AttentionBackend, get
from builders import AdvanceLevel, AdvanceSupport, AttentionBatch, AttentionSpec, ReferenceBuilder, ReferenceMetadata
from spec_decode.drafter import Drafter, Drafts, VerifiedTokens
from spec_decode.graphs import CaptureError
from tests.foreseen import Foreseen, ForeseenBuilder
from tests.mutants.mutant import (
    Mutant,
    Restated,
    builder_mutant,
    freeze,
    lists_pages,
    of_built,
    then,
    values_of,
    with_builder,
)
from tests.page_lists import PageListBuilder


def _stale_lengths(self: Any, metadata: Any) -> None:
    kept = metadata.kv_end.clone()
    ReferenceBuilder.advance(self, metadata)
    metadata.kv_end.copy_(torch.minimum(kept, metadata.kv_end))


def _stale_window(self: Any, metadata: Any) -> None:
    kept = metadata.kv_start.clone()
    ReferenceBuilder.advance(self, metadata)
    metadata.kv_start.copy_(torch.where(metadata.kv_end > 0, kept, 0))


def _increments_itself(self: Any, metadata: Any) -> None:
    before = metadata.kv_end.clone()
    ReferenceBuilder.advance(self, metadata)
    metadata.kv_end.copy_(torch.where(before > 0, before + 1, 0))


@then
def _reallocates(self: Any, metadata: Any) -> None:
    object.__setattr__(metadata, "kv_end", metadata.kv_end.clone())


def _reads_the_host(self: Any, metadata: Any) -> None:
    if int(metadata.seq_lens.max()) > 0:
        ReferenceBuilder.advance(self, metadata)


def _off_by_one_at_a_page_edge(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    self.slots = torch.empty_like(batch.slot_mapping) if not hasattr(self, "slots") else self.slots
    return replace(ReferenceBuilder.build(self, batch, horizon=horizon), slot_mapping=_edge(self, batch))


def _edge(self: Any, batch: Any) -> torch.Tensor:
    slots = batch.slot_mapping
    at_edge = (slots % self.spec.page_size == self.spec.page_size - 1) & (slots >= 0)
    return torch.where(at_edge, slots - 1, slots)


@of_built
def _padding_writes_slot_0(self: Any, batch: Any, metadata: Any) -> Any:
    return replace(metadata, slot_mapping=batch.slot_mapping.clamp(min=0))


def _bakes_max_seq_len(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    return ReferenceBuilder.build(self, replace(batch, max_seq_len=max(batch.host_seq_lens)), horizon=horizon)


def _writes_the_batch(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    batch.seq_lens.clamp_(min=1)
    return ReferenceBuilder.build(self, batch, horizon=horizon)


@of_built
def _builds_elsewhere(self: Any, batch: Any, metadata: Any) -> Any:
    self.kept = [*getattr(self, "kept", []), metadata.kv_end.clone()]
    return replace(metadata, kv_end=self.kept[-1])


def _stays(self: Any, metadata: Any) -> None: ...


@then
def _writes_past_its_limit(self: Any, metadata: Any) -> None:
    """A row that became inert goes on with the next slot of its pages."""
    position, size = metadata.positions + 1, self.spec.page_size
    column = (position // size).clamp(max=metadata.block_table.shape[1] - 1)
    page = metadata.block_table[metadata.token_to_req, column].long()
    inert = (metadata.slot_mapping < 0) & (page >= 0) & (position > 1)
    metadata.slot_mapping.copy_(torch.where(inert, page * size + position % size, metadata.slot_mapping))


def _advances_decodes_only(self: Any, metadata: Any) -> None:
    if metadata.max_query_len == 1:
        ReferenceBuilder.advance(self, metadata)


@contextmanager
def _leaving_out_rounds_without_drafts(backend: AttentionBackend) -> Iterator[AttentionBackend]:
    """As engines do that call no drafter where nobody asks for drafts: the verified tokens' KV is never written."""
    propose = Drafter.propose

    def propose_some(self: Drafter, verified: VerifiedTokens, num_tokens: int | None = None) -> Drafts:
        none = num_tokens == 0 or (verified.draft_lens is not None and not verified.draft_lens.any())
        return self._step.drafts(len(verified.seeds), 0) if none else propose(self, verified, num_tokens)

    with mock.patch.object(Drafter, "propose", propose_some):
        yield backend


@then
def _knows_the_rows_of_its_build(self: Any, metadata: Any) -> None:
    metadata.kv_end[self.live_at_build :] = 0


@of_built
def _counts_live_rows(self: Any, batch: Any, metadata: Any) -> Any:
    self.live_at_build = sum(length > 0 for length in batch.host_seq_lens) * batch.max_query_len
    return metadata


@then
def _knows_the_rows_of_the_last_build(self: Any, metadata: Any) -> None:
    token = torch.arange(metadata.num_tokens, device=metadata.kv_end.device)
    metadata.kv_end.copy_(torch.where(token < self.last_tokens, metadata.kv_end, 0))


def _notes_its_size(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    if not hasattr(self, "last_tokens"):
        self.last_tokens = torch.zeros((), dtype=torch.int64, device=batch.seq_lens.device)
    self.last_tokens.fill_(batch.num_tokens)
    return ReferenceBuilder.build(self, batch, horizon=horizon)


def _builds_what_thaws(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    return _Thawed(**values_of(ReferenceBuilder.build(self, batch, horizon=horizon)))


_Thawed = make_dataclass("_Thawed", [(field.name, field.type) for field in fields(ReferenceMetadata)], kw_only=True)


class _WaitsForLengths(ReferenceBuilder):
    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(AdvanceLevel.REBUILD, "it plans on the host, by lengths that it reads")

    def build(self, batch: Any, *, horizon: int = 0) -> Any:
        self.longest = int(batch.seq_lens.max())
        return super().build(batch, horizon=horizon)


class _PlansForThePresent(ForeseenBuilder):
    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return ForeseenBuilder.advance_support(spec, device)

    def build(self, batch: AttentionBatch, *, horizon: int = 0) -> ReferenceMetadata:
        return super().build(replace(batch, host_seq_lens=(*batch.seq_lens.tolist(),)), horizon=horizon)


class _Shortsighted(Foreseen):
    builder = _PlansForThePresent


class _UndeclaredStepField(Restated):
    step_fields = ("seq_lens", "positions", "slot_mapping", "kv_start")


class _SharedBuffers(Restated):
    _pool: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        type(self)._pool = self._kv_end if type(self)._pool is None else type(self)._pool
        self._kv_end = type(self)._pool


def _counts_only_grow(self: Any, metadata: Any) -> torch.Tensor:
    return torch.maximum(metadata.page_counts, PageListBuilder.counts(self, metadata))


def _leaves_the_tail(self: Any, metadata: Any) -> torch.Tensor:
    listed = torch.arange(len(metadata.page_list)) < metadata.page_counts.sum()
    return torch.where(listed, PageListBuilder.pages(self, metadata), metadata.page_list)


BUILDER_MUTANTS = (
    builder_mutant("stale_seq_lens", "builder.advance_means_a_rebuild", advance=_stale_lengths),
    builder_mutant("window_not_moved", "builder.advance_means_a_rebuild", advance=_stale_window),
    builder_mutant(
        "increments_its_own_contents", "builder.advance_refreshes_another_batch", advance=_increments_itself
    ),
    builder_mutant(
        "reallocates_in_advance",
        "builder.advance_keeps_addresses",
        advance=_reallocates,
        not_shown="an advance runs while it is captured, never after: its new memory is the graph's own",
    ),
    builder_mutant(
        "reads_the_host_in_advance", "builder.advance_is_device_work", advance=_reads_the_host, refused=CaptureError
    ),
    builder_mutant(
        "off_by_one_slot_at_a_page_edge",
        "numerics.attention_is_right",
        cases="page_*",
        build=_off_by_one_at_a_page_edge,
    ),
    builder_mutant("padding_writes_slot_0", "builder.padding_stays_inert", build=_padding_writes_slot_0),
    builder_mutant("bakes_max_seq_len", "builder.advance_attends_right", build=_bakes_max_seq_len, refused=TypeError),
    builder_mutant("writes_into_the_batch", "builder.build_leaves_the_batch_alone", build=_writes_the_batch),
    builder_mutant(
        "builds_elsewhere",
        "builder.build_reuses_its_addresses",
        build=_builds_elsewhere,
        not_shown="a group that advances in place is built before the capture, never after",
    ),
    lists_pages("page_counts_only_grow", "builder.advance_refreshes_another_batch", counts=_counts_only_grow),
    lists_pages("tail_of_a_list_stays", "builder.advance_refreshes_another_batch", pages=_leaves_the_tail),
    Mutant(
        "undeclared_step_field",
        "builder.step_fields_are_complete",
        with_builder(_UndeclaredStepField),
        not_shown="what a builder declares of its fields, no kernel reads",
    ),
    Mutant("builders_share_buffers", "contract.builders_share_no_state", with_builder(_SharedBuffers)),
    builder_mutant(
        "writes_past_its_limit",
        "builder.limits_hold",
        advance=_writes_past_its_limit,
        not_shown="what a request writes past its limit, nobody reads",
    ),
    builder_mutant(
        "metadata_that_thaws",
        "contract.metadata_is_frozen",
        build=_builds_what_thaws,
        not_shown="a field could be bound to another tensor, and nobody does it",
    ),
    builder_mutant(
        "rows_of_its_build",
        "graph.loop_replays_over_other_batches",
        build=_counts_live_rows,
        advance=_knows_the_rows_of_its_build,
        refused=TypeError,
    ),
    builder_mutant(
        "rows_of_the_last_build",
        "graph.two_sizes_interleave",
        build=_notes_its_size,
        advance=_knows_the_rows_of_the_last_build,
    ),
    builder_mutant("advances_decodes_only", "graph.verify_replays_over_other_batches", advance=_advances_decodes_only),
    builder_mutant("advance_does_nothing", "drafter.strategies_agree", cases="k3-n3", advance=_stays),
    Mutant(
        "kv_end_as_built",
        "drafter.steps_attend_to_the_logical_prefix",
        freeze("torch_reference", "kv_end"),
        cases="k4-n3",
    ),
    Mutant(
        "waits_for_lengths",
        "drafter.a_round_never_waits",
        with_builder(_WaitsForLengths),
        not_shown="what it waits for is right",
        cases="k4-n3",
    ),
    Mutant(
        "leaves_out_rounds_without_drafts",
        "drafter.drafts_resume_after_a_pause",
        get("torch_reference"),
        not_shown="its metadata is right: what it describes was never written",
        cases="k4-n3",
        around=_leaving_out_rounds_without_drafts,
    ),
    Mutant("plans_for_the_present", "builder.plans_ahead_attend_right", _Shortsighted()),
)
