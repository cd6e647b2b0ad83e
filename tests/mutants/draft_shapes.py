"""Backends, and a drafter, that are wrong over blocks and trees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from attn_backends import AttentionBackend
from attn_backends.merged_trees import merge_tree
from attn_backends.triton_paged import TritonPaged
from builders import ReferenceBuilder
from builders.flash_attn3 import FlashAttn3Builder, FlashAttn3Metadata
from spec_decode.trees import BlockTree
from tests import flash_attn3_stand_in
from tests.mutants.mutant import advance, around, attends_by, backend, build, derived

_BLOCKS, _NO_BLOCK = "numerics.blocks_see_what_is_behind", "the validator drafts no blocks"
_TREES, _NO_TREE = "numerics.trees_see_their_ancestors", "the validator drafts no trees"
_OTHER_TREES = "graph.tree_replays_over_other_trees"


@attends_by(_BLOCKS, not_shown=_NO_BLOCK)
def blocks_are_causal(metadata: Any, spec: Any) -> Any:
    return replace(metadata, kv_end=torch.where(metadata.kv_end > 0, metadata.positions + 1, 0).int())


@build(_BLOCKS, cases="window-*", not_shown=_NO_BLOCK)
def windows_of_a_blocks_end(self: Any, batch: Any, metadata: Any) -> Any:
    if not self.spec.causal and self.spec.sliding_window:
        metadata.kv_start.copy_((metadata.kv_end - self.spec.sliding_window).clamp_(min=0))
    return metadata


@advance("graph.blocks_replay_over_other_batches", not_shown=_NO_BLOCK)
def ends_of_the_last_blocks(self: Any, metadata: Any) -> None:
    end = metadata.kv_end.clone()
    ReferenceBuilder.advance(self, metadata)
    if not self.spec.causal:
        metadata.kv_end.copy_(end)


@advance("drafter.strategies_agree_on_blocks", cases="k4-n3", not_shown=_NO_BLOCK)
def advances_short_queries_only(self: Any, metadata: Any) -> None:
    if metadata.max_query_len <= 5:
        ReferenceBuilder.advance(self, metadata)


@attends_by(_TREES, not_shown=_NO_TREE)
def sees_its_siblings(metadata: Any, spec: Any) -> Any:
    return replace(metadata, tree_masks=None)


@attends_by(_TREES, not_shown=_NO_TREE)
def trees_are_chains(metadata: Any, spec: Any) -> Any:
    if metadata.tree_masks is not None:
        index = torch.arange(metadata.num_tokens) - metadata.query_start_loc[metadata.token_to_req]
        # All bits up to its own; for the 64th token, all.
        metadata = replace(metadata, tree_masks=torch.where(index < 63, (1 << (index + 1).clamp(max=63)) - 1, -1))
    return metadata


@build(_OTHER_TREES, not_shown=_NO_TREE)
def masks_of_the_last_round(self: Any, batch: Any, metadata: Any) -> Any:
    masks = metadata.tree_masks
    return metadata if masks is None else replace(metadata, tree_masks=masks.clone())


masks_of_the_capture = replace(
    masks_of_the_last_round,
    name="masks_of_the_capture",
    killer="drafter.strategies_agree_on_trees",
    cases="k4-n3-dynamic",
)


class MergesTrees(TritonPaged):
    """Trees on kernels without tree support: a prefix with its lse, then the tree. Correct as it stands."""

    name = "merges_trees"
    builder: Any = FlashAttn3Builder
    lse_base_2 = False

    def forward(self, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
        if metadata.tree_masks is None or spec.sliding_window:
            return super().forward(query, cache, metadata, spec=spec, sinks=sinks)
        tensors = (metadata.query_start_loc, metadata.kv_lens, metadata.block_table, None)
        sizes = (spec.softmax_scale, False, -1, -1, spec.soft_cap or 0.0)
        by_request = metadata.num_reqs, spec.num_kv_heads
        scales = (None if one is None else one.expand(by_request) for one in (cache.key_scale, cache.value_scale))
        out, lse = flash_attn3_stand_in.attend(query, cache.key, cache.value, *tensors, *sizes, *scales)
        return merge_tree(out, lse.t(), query, cache, metadata, spec, sinks, lse_base_2=self.lse_base_2)


@backend(_TREES, not_shown=_NO_TREE)
class MistakesTheBaseOfAnLse(MergesTrees):
    lse_base_2 = True


def _count_prefixes_once(self: Any, metadata: FlashAttn3Metadata) -> None:
    if metadata.tree_masks is not None and not hasattr(self, "counted"):
        self.counted = True
        FlashAttn3Builder.advance(self, metadata)


@backend(_OTHER_TREES, not_shown=_NO_TREE)
class PrefixesOfTheLastTrees(MergesTrees):
    builder = derived("CountsOnce", FlashAttn3Builder, advance=_count_prefixes_once)


@around("drafter.strategies_agree_on_blocks", cases="*-dynamic-tree", not_shown=_NO_TREE)
def trees_of_the_first_block(backend: AttentionBackend) -> Iterator[AttentionBackend]:
    """Keeps the depths of the first round, which for a graph is its capture, on padding rows."""
    grow = BlockTree.grow

    def grow_as_before(self: Any, logits: torch.Tensor, depths: torch.Tensor, temperature: torch.Tensor) -> None:
        if not hasattr(self, "first_depths"):
            self.first_depths = depths.clone()
        grow(self, logits, self.first_depths[: len(depths)], temperature)

    with mock.patch.object(BlockTree, "grow", grow_as_before):
        yield backend
