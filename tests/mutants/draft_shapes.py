"""Backends, and a drafter, that are wrong over blocks and trees."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from attn_backends import AttentionBackend
from attn_backends.merged_trees import merge_tree
from attn_backends.triton_paged import TritonPaged
from builders import AdvanceSupport, AttentionSpec, FlashAttn3Builder, FlashAttn3Metadata, ReferenceBuilder
from spec_decode.trees import BlockTree
from tests import flash_attn3_stand_in
from tests.mutants.mutant import (
    Mutant,
    attends_by,
    builder_mutant,
    derived,
    of_built,
    then,
    with_builder,
    with_forward,
)

_NO_BLOCK = "the validator drafts no blocks"


@attends_by
def _blocks_are_causal(metadata: Any, spec: Any) -> Any:
    return replace(metadata, kv_end=torch.where(metadata.kv_end > 0, metadata.positions + 1, 0).int())


@then
def _windows_end_at_a_blocks_own_tokens(self: Any, metadata: Any) -> None:
    if not self.spec.causal and self.spec.sliding_window:
        metadata.kv_start.copy_((metadata.kv_end - self.spec.sliding_window).clamp_(min=0))


def _leaves_a_blocks_end(self: Any, metadata: Any) -> None:
    end = metadata.kv_end.clone()
    ReferenceBuilder.advance(self, metadata)
    if not self.spec.causal:
        metadata.kv_end.copy_(end)


_NO_TREE = "the validator drafts no trees"


@attends_by
def _sees_its_siblings(metadata: Any, spec: Any) -> Any:
    return replace(metadata, tree_masks=None)


@attends_by
def _trees_are_chains(metadata: Any, spec: Any) -> Any:
    if metadata.tree_masks is not None:
        index = torch.arange(metadata.num_tokens) - metadata.query_start_loc[metadata.token_to_req]
        # All bits up to its own; of the last there is, all.
        metadata = replace(metadata, tree_masks=torch.where(index < 63, (1 << (index + 1).clamp(max=63)) - 1, -1))
    return metadata


@of_built
def _keeps_the_masks_it_was_built_with(self: Any, batch: Any, metadata: Any) -> Any:
    masks = metadata.tree_masks
    return metadata if masks is None else replace(metadata, tree_masks=masks.clone())


class MergesTrees(TritonPaged):
    """Trees as kernels serve them that know none: a prefix with its lse, then the tree. Right as it stands."""

    name = "merges_trees"
    builder: Any = FlashAttn3Builder
    lse_base_2 = False

    def forward(self, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
        if metadata.tree_masks is None or spec.sliding_window:
            return super().forward(query, cache, metadata, spec=spec, sinks=sinks)
        tensors = (metadata.query_start_loc, metadata.kv_lens, metadata.block_table, None)
        sizes = (spec.softmax_scale, False, -1, -1, spec.soft_cap or 0.0)
        out, lse = flash_attn3_stand_in.attend(query, cache.key, cache.value, *tensors, *sizes)
        return merge_tree(out, lse.t(), query, cache, metadata, spec, sinks, lse_base_2=self.lse_base_2)


class _MistakesTheBase(MergesTrees):
    lse_base_2 = True


class _CountsPrefixesOnce(FlashAttn3Builder):
    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return FlashAttn3Builder.advance_support(spec, device)

    def advance(self, metadata: FlashAttn3Metadata) -> None:
        if metadata.tree_masks is not None and not self._prefix_lens.any():
            super().advance(metadata)


class _LeavesPrefixes(MergesTrees):
    builder = _CountsPrefixesOnce


def _advances_short_queries_only(self: Any, metadata: Any) -> None:
    if metadata.max_query_len <= 5:
        ReferenceBuilder.advance(self, metadata)


@contextmanager
def _as_deep_as_in_the_first_round(backend: AttentionBackend) -> Iterator[AttentionBackend]:
    """A graph's first round is its capture, of padding rows."""
    grow = BlockTree.grow

    def grow_as_before(self: Any, logits: torch.Tensor, depths: torch.Tensor, temperature: torch.Tensor) -> None:
        if not hasattr(self, "first_depths"):
            self.first_depths = depths.clone()
        grow(self, logits, self.first_depths[: len(depths)], temperature)

    with mock.patch.object(BlockTree, "grow", grow_as_before):
        yield backend


DRAFT_SHAPE_MUTANTS = (
    Mutant(
        "blocks_are_causal", "numerics.blocks_see_what_is_behind", with_forward(_blocks_are_causal), not_shown=_NO_BLOCK
    ),
    Mutant(
        "windows_of_a_blocks_end",
        "numerics.blocks_see_what_is_behind",
        with_builder(derived("windows_of_a_blocks_end", advance=_windows_end_at_a_blocks_own_tokens)),
        not_shown=_NO_BLOCK,
        cases="window-*",
    ),
    builder_mutant(
        "ends_of_the_last_blocks",
        "graph.blocks_replay_over_other_batches",
        advance=_leaves_a_blocks_end,
        not_shown=_NO_BLOCK,
    ),
    Mutant(
        "sees_its_siblings", "numerics.trees_see_their_ancestors", with_forward(_sees_its_siblings), not_shown=_NO_TREE
    ),
    Mutant(
        "trees_are_chains", "numerics.trees_see_their_ancestors", with_forward(_trees_are_chains), not_shown=_NO_TREE
    ),
    builder_mutant(
        "masks_of_the_last_round",
        "graph.tree_replays_over_other_trees",
        build=_keeps_the_masks_it_was_built_with,
        not_shown=_NO_TREE,
    ),
    builder_mutant(
        "masks_of_the_capture",
        "drafter.strategies_agree_on_trees",
        build=_keeps_the_masks_it_was_built_with,
        not_shown=_NO_TREE,
        cases="k4-n3-dynamic",
    ),
    builder_mutant(
        "advances_short_queries_only",
        "drafter.strategies_agree_on_blocks",
        advance=_advances_short_queries_only,
        not_shown=_NO_BLOCK,
        cases="k4-n3",
    ),
    Mutant(
        "trees_of_the_first_block",
        "drafter.strategies_agree_on_blocks",
        with_builder(derived("trees_of_the_first_block")),
        not_shown=_NO_TREE,
        around=_as_deep_as_in_the_first_round,
        cases="*-dynamic-tree",
    ),
    Mutant("mistakes_the_base_of_an_lse", "numerics.trees_see_their_ancestors", _MistakesTheBase(), not_shown=_NO_TREE),
    Mutant("prefixes_of_the_last_trees", "graph.tree_replays_over_other_trees", _LeavesPrefixes(), not_shown=_NO_TREE),
)
