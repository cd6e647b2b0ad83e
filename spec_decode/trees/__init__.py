"""Trees of draft tokens: their shapes, their attention masks, and how they grow."""

from builders.spec import MAX_TREE_TOKENS
from spec_decode.trees.block_tree import BlockTree
from spec_decode.trees.draft_tree import DraftTree, TreeBatch
from spec_decode.trees.dynamic_tree import DynamicTree, DynamicTreeConfig, Tree
from spec_decode.trees.static_tree import StaticTree

__all__ = [
    "MAX_TREE_TOKENS",
    "BlockTree",
    "DraftTree",
    "DynamicTree",
    "DynamicTreeConfig",
    "StaticTree",
    "Tree",
    "TreeBatch",
]
