"""Backends that are right at the usual sizes, and in a one-layer drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from attn_backends import Feature, KVCache
from attn_backends.kernels.softmax import softmax_with_sinks
from attn_backends.torch_reference import TorchReference
from builders import AttentionKind, AttentionSpec, ReferenceBuilder
from spec_decode.testing.poison import bits
from tests.mutants.attention import RIGHT
from tests.mutants.builders import ANOTHER, REBUILD, counts_live_rows
from tests.mutants.mutant import (
    Mutant,
    advance,
    attends_by,
    backend,
    build,
    builder,
    derived,
    forward,
    gives,
    lists_pages,
    with_forward,
)

_EDGES = "numerics.edges_are_right"
_OF_A_LAYER = "drafter.layers_and_groups_attend_to_their_own_prefix"
_INPUTS = "numerics.forward_leaves_its_inputs_alone"


@gives(_INPUTS)
def consumes_its_metadata(out: torch.Tensor, metadata: Any, spec: Any) -> torch.Tensor:
    metadata.kv_end.sub_(1).clamp_(min=0)
    return out


consumes_it_in_the_first_layer = replace(
    consumes_its_metadata, name="consumes_it_in_the_first_layer", killer=_OF_A_LAYER
)

_last: dict[str, Any] = {}
"""State that two mutants keep per process: the window of the last builder made, and a block table by its shape."""


def _notes_its_window(self: Any, *args: Any, **bounds: int) -> None:
    ReferenceBuilder.__init__(self, *args, **bounds)
    _last["window"] = self.spec.sliding_window


@advance("drafter.strategies_agree_on_layers_and_groups", __init__=_notes_its_window)
def advances_by_the_window_made_last(self: Any, metadata: Any) -> None:
    own, self.spec = self.spec, replace(self.spec, sliding_window=_last["window"])
    ReferenceBuilder.advance(self, metadata)
    self.spec = own


def _keep_pages_by_shape(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    _last[str(batch.block_table.shape)] = batch.block_table
    return ReferenceBuilder.build(self, batch, horizon=horizon)


@backend(_OF_A_LAYER)
class KeepsPagesByShape(TorchReference):
    builder = derived("KeepsPages", build=_keep_pages_by_shape)

    def forward(self, query: Any, cache: Any, metadata: Any, **options: Any) -> torch.Tensor:
        kept = replace(metadata, block_table=_last[str(metadata.block_table.shape)])
        return super().forward(query, cache, kept, **options)


def _build_with_a_table_of_its_own(self: Any, batch: Any, metadata: Any) -> Any:
    """Keeps the table as long as the first page of every row is unchanged."""
    self.live = batch.block_table
    if not hasattr(self, "table") or self.table.shape != self.live.shape:
        self.table = self.live.clone()
    if not self.rebuilds or not torch.equal(self.table[:, 0], self.live[:, 0]):
        self.table.copy_(self.live)
    return replace(metadata, block_table=self.table)


@advance(ANOTHER, build=_build_with_a_table_of_its_own, rebuilds=False)
def keeps_a_table_by_its_first_page(self: Any, metadata: Any) -> None:
    ReferenceBuilder.advance(self, metadata)
    if not torch.equal(self.table[:, 0], self.live[:, 0]):
        self.table.copy_(self.live)


@build("builder.build_reuses_its_addresses")
def rebuilds_a_table_by_its_first_page(self: Any, batch: Any, metadata: Any) -> Any:
    self.rebuilds = True
    return _build_with_a_table_of_its_own(self, batch, metadata)


@advance("graph.replayed_advances_mean_a_rebuild")
def unseen_after_five_advances(self: Any, metadata: Any) -> None:
    """No attention shows it: starting at -1 sees the same as starting at 0."""
    ReferenceBuilder.advance(self, metadata)
    self.advances = getattr(self, "advances", 0) + 1
    if self.advances > 5:
        metadata.kv_start.masked_fill_(metadata.kv_start == 0, -1)


@builder("builder.constants_are_served")
class StatesItsOwnBound(ReferenceBuilder):
    def capture_constants(self, metadata: Any) -> Any:
        return replace(super().capture_constants(metadata), max_seq_len=self.max_seq_len)


@build("builder.build_reads_no_device")
def reads_lengths_in_build(self: Any, batch: Any, metadata: Any) -> Any:
    assert int(batch.seq_lens.max()) >= 0
    return metadata


@build("builder.build_reads_no_device")
def lists_lengths_in_build(self: Any, batch: Any, metadata: Any) -> Any:
    assert (batch.seq_lens + 1).tolist()
    return metadata


@build("builder.build_reads_no_device")
def repeats_by_lengths_in_build(self: Any, batch: Any, metadata: Any) -> Any:
    assert batch.seq_lens.repeat_interleave(batch.seq_lens).dim()
    return metadata


@build("builder.host_lengths_may_be_bounds")
def takes_bounds_for_lengths(self: Any, batch: Any, metadata: Any) -> Any:
    lengths = torch.tensor(batch.host_seq_lens, dtype=torch.int32)[metadata.token_to_req]
    return replace(metadata, kv_end=lengths if batch.max_query_len == 1 else metadata.kv_end)


@advance(REBUILD, cases="mla_base-*")
def latents_stay_as_built(self: Any, metadata: Any) -> None:
    if self.spec.kind is not AttentionKind.MLA:
        ReferenceBuilder.advance(self, metadata)


@gives(RIGHT, cases="bf16-*")
def returns_fp32(out: torch.Tensor, metadata: Any, spec: Any) -> torch.Tensor:
    return out.float()


@gives(RIGHT, cases="base-verify")
def padding_of_a_verification_is_1(out: torch.Tensor, metadata: Any, spec: Any) -> torch.Tensor:
    padding = (metadata.kv_end == 0) & (metadata.max_query_len > 1)
    return out.masked_fill(padding[:, None, None], 1.0)


@backend(RIGHT, cases="base-*")
class WritesAdjacentTokens(TorchReference):
    """Ignores strides: for keys and values that are views of one projection, it reads what lies between them."""

    def write_kv(self, key: Any, value: Any, cache: Any, metadata: Any) -> None:
        plain = [t.as_strided(t.shape, torch.empty(t.shape, device="meta").stride()) for t in (key, value)]
        super().write_kv(*plain, cache, metadata)


@gives("poison.uninitialised_memory_is_not_read")
def counts_from_what_is_there(out: torch.Tensor, metadata: Any, spec: Any) -> torch.Tensor:
    """Like a kernel with locks or counters that must start at 0; memory this large is fresh each time, hence 0."""
    return out + torch.empty(1 << 24, dtype=torch.int32)[0]


@forward(_INPUTS)
def returns_one_buffer(self: Any, query: Any, cache: Any, metadata: Any, **options: Any) -> torch.Tensor:
    out = TorchReference.forward(self, query, cache, metadata, **options)
    if getattr(self, "out", out).shape != out.shape or not hasattr(self, "out"):
        self.out = torch.empty_like(out)
    return self.out.copy_(out)


@forward("numerics.strides_are_followed")
def knows_one_layout(self: Any, query: Any, cache: Any, metadata: Any, **options: Any) -> torch.Tensor:
    plain = [t.as_strided(t.shape, torch.empty(t.shape, device="meta").stride()) for t in (cache.key, cache.value)]
    return TorchReference.forward(self, query, KVCache(*plain), metadata, **options)


@attends_by("numerics.shared_pages_are_read_by_each_row")
def reads_each_page_once(metadata: Any, spec: Any) -> Any:
    table = metadata.block_table
    seen = (table[1:, :1] == table[:1, :1]) & (table[:1, :1] >= 0)
    start = torch.cat([torch.zeros_like(metadata.seq_lens[:1]), seen[:, 0].int() * spec.page_size])
    later = torch.maximum(metadata.kv_start, start[metadata.token_to_req].to(metadata.kv_start.dtype))
    return replace(metadata, kv_start=later)


@backend("numerics.bits_do_not_depend_on_the_batch")
class RoundsByTheRows(TorchReference):
    """The last bit of every output tells whether its row was the only one."""

    capabilities = replace(TorchReference.capabilities, features=frozenset(Feature))

    def forward(self, query: Any, cache: Any, metadata: Any, **options: Any) -> torch.Tensor:
        out = super().forward(query, cache, metadata, **options)
        bits(out).bitwise_and_(-2).bitwise_or_(int(metadata.num_reqs == 1))
        return out


@backend("numerics.bits_do_not_depend_on_the_batch")
class RoundsByManyRows(TorchReference):
    """A different summation order from 16 rows on."""

    capabilities = replace(TorchReference.capabilities, features=frozenset(Feature))

    def forward(self, query: Any, cache: Any, metadata: Any, **options: Any) -> torch.Tensor:
        out = super().forward(query, cache, metadata, **options)
        bits(out).bitwise_and_(-2).bitwise_or_(int(metadata.num_reqs >= 16))
        return out


@gives(_EDGES, cases="rows_96")
def serves_64_rows(out: torch.Tensor, metadata: Any, spec: Any) -> torch.Tensor:
    return torch.where((metadata.token_to_req < 64)[:, None, None], out, 0.0)


@gives(_EDGES, cases="rows_260")
def serves_256_rows(out: torch.Tensor, metadata: Any, spec: Any) -> torch.Tensor:
    return torch.where((metadata.token_to_req < 256)[:, None, None], out, 0.0)


def _beyond_256_tokens(name: str, killer: str, cases: str, change: Callable[[AttentionSpec], AttentionSpec]) -> Mutant:
    """Attends by a changed spec over contexts of several key splits."""

    def forward(self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
        outs = []
        for each in (spec, change(spec)):
            by_head = sinks if each.sinks else None
            outs.append(TorchReference.forward(self, query, cache, metadata, spec=each, sinks=by_head))
        return torch.where((metadata.seq_lens > 256)[metadata.token_to_req][:, None, None], *outs[::-1])

    return Mutant(name, killer, with_forward(forward), cases=cases)


sinks_of_one_split = _beyond_256_tokens(
    "sinks_of_one_split", _EDGES, "sinks_4099", lambda spec: replace(spec, sinks=False)
)
caps_in_one_split = _beyond_256_tokens(
    "caps_in_one_split", _EDGES, "soft_cap_4099", lambda spec: replace(spec, soft_cap=None)
)
scales_fp8_in_one_split = _beyond_256_tokens(
    "scales_fp8_in_one_split",
    _EDGES,
    "fp8_4099",
    lambda spec: replace(spec, scale=None) if spec.cache_dtype.itemsize == 1 else spec,
)


@attends_by(_EDGES, cases="window_1024")
def windows_of_512_at_most(metadata: Any, spec: Any) -> Any:
    if spec.sliding_window:
        metadata = replace(metadata, kv_start=torch.maximum(metadata.kv_start, metadata.kv_end - 512))
    return metadata


@attends_by("numerics.blocks_see_what_is_behind", cases="base-splits")
def blocks_are_causal_beyond_256_tokens(metadata: Any, spec: Any) -> Any:
    end = torch.where(metadata.kv_end > 256, metadata.positions + 1, metadata.kv_end)
    return replace(metadata, kv_end=metadata.kv_end if spec.causal else end.int())


@attends_by("numerics.trees_see_their_ancestors", cases="base-splits")
def trees_are_seen_whole_beyond_256_tokens(metadata: Any, spec: Any) -> Any:
    if metadata.tree_masks is not None:
        masks = torch.where(metadata.kv_end > 256, -1, metadata.tree_masks)
        metadata = replace(metadata, tree_masks=masks)
    return metadata


def _scales_by_default(killer: str, where: Callable[[AttentionSpec], bool], name: str) -> Mutant:
    """Ignores the spec's scale wherever `where` holds."""

    def forward(self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
        by = replace(spec, scale=None) if where(spec) else spec
        return TorchReference.forward(self, query, cache, metadata, spec=by, sinks=sinks)

    return Mutant(name, killer, with_forward(forward), cases="scale-*")


scales_blocks_by_default = _scales_by_default(
    "numerics.blocks_see_what_is_behind", lambda spec: not spec.causal, "scales_blocks_by_default"
)
scales_trees_by_default = _scales_by_default(
    "numerics.trees_see_their_ancestors", lambda spec: spec.tree, "scales_trees_by_default"
)


@attends_by(_EDGES, cases="length_4099")
def counts_in_fp16(metadata: Any, spec: Any) -> Any:
    return replace(metadata, kv_end=metadata.kv_end.half().int())


@attends_by(_EDGES, cases="length_4099")
def stops_at_4096(metadata: Any, spec: Any) -> Any:
    return replace(metadata, kv_end=metadata.kv_end.clamp(max=4096))


def _loses_a_token_alone_in_its_page(page_size: int) -> Mutant:
    """Right except for contexts that end one token into a page of this size."""

    def forward(self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
        end = metadata.kv_end
        alone = (end % page_size == 1) & (end > 1) & (spec.page_size == page_size)
        shorter = replace(metadata, kv_end=end - alone.int())
        return TorchReference.forward(self, query, cache, shorter, spec=spec, sinks=sinks)

    name = f"loses_a_token_alone_in_its_page_of_{page_size}"
    return Mutant(name, _EDGES, with_forward(forward), cases=f"page_{page_size}")


loses_it_in_pages_of_64, loses_it_in_pages_of_128 = map(_loses_a_token_alone_in_its_page, (64, 128))


@gives(_EDGES, cases="prefill_150")
def serves_64_query_tokens(out: torch.Tensor, metadata: Any, spec: Any) -> torch.Tensor:
    index = torch.arange(metadata.num_tokens) - metadata.query_start_loc[metadata.token_to_req]
    return torch.where((index < 64)[:, None, None], out, 0.0)


@attends_by(_EDGES, cases="verify_2051")
def verifies_over_the_last_512_tokens(metadata: Any, spec: Any) -> Any:
    if metadata.max_query_len > 1:
        metadata = replace(metadata, kv_start=torch.maximum(metadata.kv_start, metadata.kv_end - 512))
    return metadata


@attends_by(_EDGES, cases="window_128")
def one_short_in_wide_windows(metadata: Any, spec: Any) -> Any:
    if (spec.sliding_window or 0) >= 128:
        first = metadata.kv_start + 1
        metadata = replace(metadata, kv_start=torch.where(metadata.kv_start > 0, first, metadata.kv_start))
    return metadata


@attends_by(_EDGES, cases="far_pages")
def pages_in_15_bits(metadata: Any, spec: Any) -> Any:
    table = metadata.block_table
    return replace(metadata, block_table=torch.where(table < 0, table, table & 0x7FFF))


@forward(_EDGES, cases="scores_200")
def subtracts_no_maximum(
    self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None
) -> torch.Tensor:
    out = TorchReference.forward(self, query, cache, metadata, spec=spec, sinks=sinks)
    keys = cache.key.flatten(0, 1).float().nan_to_num().repeat_interleave(spec.group_size, 1)
    scores = torch.einsum("thd,nhd->thn", query.float(), keys) * spec.softmax_scale
    return out + 0 * scores.exp().sum(-1, keepdim=True)


@forward(_EDGES, cases="one_key_of_low_score")
def begins_its_maximum_at_a_number(self: Any, query: Any, cache: Any, metadata: Any, **options: Any) -> torch.Tensor:
    def softmax(scores: torch.Tensor, *rest: Any) -> torch.Tensor:
        return softmax_with_sinks(scores, *rest) * (scores.amax(-1, keepdim=True) > -5e4)

    with mock.patch("attn_backends.torch_reference.softmax_with_sinks", softmax):
        return TorchReference.forward(self, query, cache, metadata, **options)


def _only(name: str, case: str, wrong: Callable[[Any], bool], killer: str = _EDGES) -> Mutant:
    """Right except for specs for which `wrong` holds."""

    def forward(self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
        out = TorchReference.forward(self, query, cache, metadata, spec=spec, sinks=sinks)
        return out.roll(1, 1) if wrong(spec) else out

    return Mutant(name, killer, with_forward(forward), cases=case)


heads_of_more_than_2_groups = _only(
    "wrong_for_more_than_2_kv_heads", "kv_heads_[58]-*", lambda spec: spec.num_kv_heads > 2, RIGHT
)
groups_of_3 = _only("wrong_for_groups_of_3", "group_3", lambda spec: spec.group_size == 3)
groups_of_7 = _only("wrong_for_groups_of_7", "group_7", lambda spec: spec.group_size == 7)
pages_of_24 = _only("wrong_for_pages_of_24", "page_24", lambda spec: spec.page_size == 24)
dims_of_192 = _only("wrong_for_dims_of_192", "dim_192", lambda spec: spec.head_dim == 192)
dims_above_256 = _only("wrong_for_dims_above_256", "dim_512", lambda spec: spec.head_dim > 256)


@advance("graph.blocks_replay_over_other_batches", build=counts_live_rows)
def blocks_of_its_build(self: Any, metadata: Any) -> None:
    ReferenceBuilder.advance(self, metadata)
    if not self.spec.causal:
        metadata.kv_end[self.live_at_build :] = 0


@advance("graph.tree_replays_over_other_trees", build=counts_live_rows)
def trees_of_its_build(self: Any, metadata: Any) -> None:
    ReferenceBuilder.advance(self, metadata)
    if metadata.tree_masks is not None:
        metadata.kv_end[self.live_at_build :] = 0


@lists_pages(REBUILD, method="counts")
def pages_have_16_tokens(self: Any, metadata: Any) -> torch.Tensor:
    """Right for pages of 16 tokens, the default of a test's drafter."""
    return (metadata.seq_lens + 15) // 16
