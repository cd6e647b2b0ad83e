"""Backends that are right at the usual sizes, and in a drafter of one layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from attn_backends import Feature, KVCache
from attn_backends.kernels.softmax import softmax_with_sinks
from attn_backends.torch_reference import TorchReference
from builders import ReferenceBuilder
from spec_decode.testing.poison import bits
from tests.mutants.mutant import attends_by, broken_once_built, claims, derived, gives, lists_pages, right_build, then


@gives
def _consumes_its_metadata(out: torch.Tensor, metadata: Any, spec: Any) -> torch.Tensor:
    metadata.kv_end.sub_(1).clamp_(min=0)
    return out


_last: dict[str, Any] = {}
"""What two lies keep for the whole process: the window of the builder made last, and a block table by its shape."""


def _notes_its_window(self: Any, *args: Any, **bounds: int) -> None:
    ReferenceBuilder.__init__(self, *args, **bounds)
    _last["window"] = self.spec.sliding_window


def _advances_by_the_window_made_last(self: Any, metadata: Any) -> None:
    own, self.spec = self.spec, replace(self.spec, sliding_window=_last["window"])
    ReferenceBuilder.advance(self, metadata)
    self.spec = own


def _keeps_pages_by_shape(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    _last[str(batch.block_table.shape)] = batch.block_table
    return ReferenceBuilder.build(self, batch, horizon=horizon)


@attends_by
def _attends_to_pages_by_shape(metadata: Any, spec: Any) -> Any:
    return replace(metadata, block_table=_last[str(metadata.block_table.shape)])


def _only(wrong: Callable[[Any], bool]) -> Callable[..., torch.Tensor]:
    """A forward that is right but for the specs that `wrong` names."""

    def forward(self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
        out = TorchReference.forward(self, query, cache, metadata, spec=spec, sinks=sinks)
        return out.roll(1, 1) if wrong(spec) else out

    return forward


@then
def _keeps_its_table(self: Any, metadata: Any) -> None:
    """The table is kept while the first page of every row is as it was."""
    if not torch.equal(self.table[:, 0], self.live[:, 0]):
        self.table.copy_(self.live)


def _builds_with_a_table_of_its_own(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    self.live = batch.block_table
    if not hasattr(self, "table") or self.table.shape != self.live.shape:
        self.table = self.live.clone()
    if not self.rebuilds or not torch.equal(self.table[:, 0], self.live[:, 0]):
        self.table.copy_(self.live)
    return replace(ReferenceBuilder.build(self, batch, horizon=horizon), block_table=self.table)


def _stops_after_500_advances(self: Any, metadata: Any) -> None:
    self.advances = getattr(self, "advances", 0) + 1
    if self.advances <= 500:
        ReferenceBuilder.advance(self, metadata)


@attends_by
def _is_one_short_in_wide_windows(metadata: Any, spec: Any) -> Any:
    if (spec.sliding_window or 0) >= 128:
        first = metadata.kv_start + 1
        metadata = replace(metadata, kv_start=torch.where(metadata.kv_start > 0, first, metadata.kv_start))
    return metadata


@attends_by
def _names_pages_in_15_bits(metadata: Any, spec: Any) -> Any:
    table = metadata.block_table
    cut = replace(metadata, block_table=torch.where(table < 0, table, table & 0x7FFF))
    return cut


def _returns_one_buffer(self: Any, query: Any, cache: Any, metadata: Any, **options: Any) -> torch.Tensor:
    out = TorchReference.forward(self, query, cache, metadata, **options)
    if getattr(self, "out", out).shape != out.shape or not hasattr(self, "out"):
        self.out = torch.empty_like(out)
    return self.out.copy_(out)


@gives
def _serves_64_rows(out: torch.Tensor, metadata: Any, spec: Any) -> torch.Tensor:
    return torch.where((metadata.token_to_req < 64)[:, None, None], out, 0.0)


@attends_by
def _counts_in_fp16(metadata: Any, spec: Any) -> Any:
    return replace(metadata, kv_end=metadata.kv_end.half().int())


@attends_by
def _stops_at_4096(metadata: Any, spec: Any) -> Any:
    return replace(metadata, kv_end=metadata.kv_end.clamp(max=4096))


def _subtracts_no_maximum(
    self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None
) -> torch.Tensor:
    out = TorchReference.forward(self, query, cache, metadata, spec=spec, sinks=sinks)
    keys = cache.key.flatten(0, 1).float().nan_to_num().repeat_interleave(spec.group_size, 1)
    scores = torch.einsum("thd,nhd->thn", query.float(), keys) * spec.softmax_scale
    return out + 0 * scores.exp().sum(-1, keepdim=True)


def _begins_its_maximum_at_a_number(self: Any, query: Any, cache: Any, metadata: Any, **options: Any) -> torch.Tensor:
    def softmax(scores: torch.Tensor, *rest: Any) -> torch.Tensor:
        return softmax_with_sinks(scores, *rest) * (scores.amax(-1, keepdim=True) > -5e4)

    with mock.patch("attn_backends.torch_reference.softmax_with_sinks", softmax):
        return TorchReference.forward(self, query, cache, metadata, **options)


def _knows_one_layout(self: Any, query: Any, cache: Any, metadata: Any, **options: Any) -> torch.Tensor:
    plain = [t.as_strided(t.shape, torch.empty(t.shape, device="meta").stride()) for t in (cache.key, cache.value)]
    return TorchReference.forward(self, query, KVCache(*plain), metadata, **options)


@attends_by
def _reads_each_page_once(metadata: Any, spec: Any) -> Any:
    table = metadata.block_table
    seen = (table[1:, :1] == table[:1, :1]) & (table[:1, :1] >= 0)
    start = torch.cat([torch.zeros_like(metadata.seq_lens[:1]), seen[:, 0].int() * spec.page_size])
    later = torch.maximum(metadata.kv_start, start[metadata.token_to_req].to(metadata.kv_start.dtype))
    return replace(metadata, kv_start=later)


def _states_its_own_bound(self: Any, metadata: Any) -> Any:
    return replace(ReferenceBuilder.capture_constants(self, metadata), max_seq_len=self.max_seq_len)


def _reads_lengths_in_build(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    assert int(batch.seq_lens.max()) >= 0
    return ReferenceBuilder.build(self, batch, horizon=horizon)


def _lists_lengths_in_build(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    assert (batch.seq_lens + 1).tolist()
    return ReferenceBuilder.build(self, batch, horizon=horizon)


@then
def _unseen_after_five_advances(self: Any, metadata: Any) -> None:
    """No attention shows it: whoever begins at -1 sees what one that begins at 0 sees."""
    self.advances = getattr(self, "advances", 0) + 1
    if self.advances > 5:
        metadata.kv_start.masked_fill_(metadata.kv_start == 0, -1)


def _pages_of_16(self: Any, metadata: Any) -> torch.Tensor:
    return (metadata.seq_lens + 15) // 16


@gives
def _rounds_by_the_rows(out: torch.Tensor, metadata: Any, spec: Any) -> torch.Tensor:
    """The last bit of every output tells whether it was alone."""
    bits(out).bitwise_and_(-2).bitwise_or_(int(metadata.num_reqs == 1))
    return out


_OF_A_LAYER = "drafter.layers_and_groups_attend_to_their_own_prefix"
_EDGES = "numerics.edges_are_right"

EDGE_MUTANTS = (
    claims("consumes_its_metadata", _OF_A_LAYER, forward=_consumes_its_metadata),
    claims(
        "keeps_pages_by_shape",
        _OF_A_LAYER,
        builder=derived("KeepsPages", build=_keeps_pages_by_shape),
        forward=_attends_to_pages_by_shape,
    ),
    claims(
        "advances_by_the_window_made_last",
        "drafter.strategies_agree_on_layers_and_groups",
        builder=derived(
            "LastWindow",
            __init__=_notes_its_window,
            first_build=ReferenceBuilder.build,
            build=right_build,
            broken_advance=_advances_by_the_window_made_last,
            advance=broken_once_built,
        ),
    ),
    claims("changes_its_metadata", "numerics.forward_leaves_its_inputs_alone", forward=_consumes_its_metadata),
    claims("serves_64_rows", _EDGES, cases="rows_96", forward=_serves_64_rows),
    claims("counts_in_fp16", _EDGES, cases="length_4099", forward=_counts_in_fp16),
    claims("stops_at_4096", _EDGES, cases="length_4099", forward=_stops_at_4096),
    claims("one_short_in_wide_windows", _EDGES, cases="window_128", forward=_is_one_short_in_wide_windows),
    claims("pages_in_15_bits", _EDGES, cases="far_pages", forward=_names_pages_in_15_bits),
    claims("returns_one_buffer", "numerics.forward_leaves_its_inputs_alone", forward=_returns_one_buffer),
    claims(
        "stops_after_500_advances",
        "builder.advances_go_on",
        builder=derived("Stops", advance=_stops_after_500_advances),
    ),
    claims(
        "keeps_a_table_by_its_first_page",
        "builder.advance_refreshes_another_batch",
        builder=derived("KeepsTable", rebuilds=False, build=_builds_with_a_table_of_its_own, advance=_keeps_its_table),
    ),
    claims(
        "rebuilds_a_table_by_its_first_page",
        "builder.build_reuses_its_addresses",
        builder=derived("RebuildsTable", rebuilds=True, build=_builds_with_a_table_of_its_own),
    ),
    claims("subtracts_no_maximum", _EDGES, cases="scores_200", forward=_subtracts_no_maximum),
    claims(
        "begins_its_maximum_at_a_number", _EDGES, cases="one_key_of_low_score", forward=_begins_its_maximum_at_a_number
    ),
    claims("wrong_for_groups_of_3", _EDGES, cases="group_3", forward=_only(lambda spec: spec.group_size == 3)),
    claims("wrong_for_groups_of_7", _EDGES, cases="group_7", forward=_only(lambda spec: spec.group_size == 7)),
    claims("wrong_for_pages_of_24", _EDGES, cases="page_24", forward=_only(lambda spec: spec.page_size == 24)),
    claims("wrong_for_dims_of_192", _EDGES, cases="dim_192", forward=_only(lambda spec: spec.head_dim == 192)),
    claims("wrong_for_dims_above_256", _EDGES, cases="dim_512", forward=_only(lambda spec: spec.head_dim > 256)),
    claims(
        "rounds_by_the_rows",
        "numerics.bits_do_not_depend_on_the_batch",
        capabilities=replace(TorchReference.capabilities, features=frozenset(Feature)),
        forward=_rounds_by_the_rows,
    ),
    claims("knows_one_layout", "numerics.strides_are_followed", forward=_knows_one_layout),
    claims("reads_each_page_once", "numerics.shared_pages_are_read_by_each_row", forward=_reads_each_page_once),
    claims(
        "states_its_own_bound",
        "builder.constants_are_served",
        builder=derived("OwnBound", capture_constants=_states_its_own_bound),
    ),
    claims(
        "reads_lengths_in_build",
        "builder.build_reads_no_device",
        builder=derived("Reads", build=_reads_lengths_in_build),
    ),
    claims(
        "lists_lengths_in_build",
        "builder.build_reads_no_device",
        builder=derived("Lists", build=_lists_lengths_in_build),
    ),
    claims(
        "unseen_after_five_advances",
        "graph.replayed_advances_mean_a_rebuild",
        builder=derived("Unseen", advance=_unseen_after_five_advances),
    ),
)
"""Beside the others: right in every other check, and in a drafter of one layer at the usual sizes."""

ONE_PAGE_SIZE = lists_pages("pages_have_16_tokens", "builder.advance_means_a_rebuild", counts=_pages_of_16)
"""Beside the others: it is right in pages of 16 tokens, which a test's drafter has unless it asks for others."""
