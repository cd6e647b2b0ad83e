import torch
from hypothesis import given

from spec_decode.graphs.emulator import EmulatedRuntime
from spec_decode.trees import DraftTree
from spec_decode.trees.kernels.ancestor_masks import ancestor_masks
from tests.spec_decode.trees.test_draft_tree import trees


def ancestors(tree, token):
    """Query tokens from the root to this one."""
    return {0} if token == 0 else {token} | ancestors(tree, tree.parents[token - 1])


def bits(word):
    return {bit for bit in range(64) if word >> bit & 1}


@given(trees())
def test_a_token_sees_its_ancestors_and_itself(tree):
    masks, depths = ancestor_masks(tree.rows(1, "cpu"))
    assert [bits(word) for word in masks[0].tolist()] == [ancestors(tree, token) for token in range(len(tree.depths))]
    assert depths[0].tolist() == list(tree.depths)


def test_each_row_has_its_own_tree_and_end():
    parents = torch.tensor([[0, 1, -1, 1], [0, 0, 2, 3], [-1, 0, 0, 0]])
    masks, depths = ancestor_masks(parents)
    assert masks.tolist() == [[1, 3, 7, 0, 0], [1, 3, 5, 13, 29], [1, 0, 0, 0, 0]]
    assert depths.tolist() == [[0, 1, 2, 0, 0], [0, 1, 1, 2, 3], [0, 0, 0, 0, 0]]


def test_graph_reads_trees_of_each_replay():
    parents = DraftTree.chain(4).rows(1, "cpu")
    out = torch.zeros(1, 5, dtype=torch.int64)
    graph = EmulatedRuntime().capture(lambda: out.copy_(ancestor_masks(parents)[0]))
    parents.copy_(DraftTree((0, 0, 0, 0)).rows(1, "cpu"))
    graph.replay()
    assert out.tolist() == [[1, 3, 5, 9, 17]]
