"""Static trees, compared with the choices of every path in plain Python."""

import pytest
import torch

from builders import BatchError
from spec_decode.trees import DraftTree, StaticTree
from tests.spec_decode.trees.tree_helpers import TREES, TableGrowth

ROWS, VOCAB = 3, 9
UNORDERED = DraftTree((0, 1, 0, 2, 3, 3))
"""Whose draft tokens are not numbered by depth."""


class Growth(TableGrowth):
    def __init__(self, shape, steps=None, **options):
        super().__init__(ROWS, VOCAB, steps or shape.max_depth)
        self.tree = StaticTree(ROWS, self.step, shape, num_speculative_tokens=self.steps, **options)


def choices(growth, shape, row):
    """The tokens of a row's tree: each query token's children are its best in turn."""
    tokens, depths = [0], shape.depths
    for at, parent in enumerate(shape.parents):
        law = growth.table[depths[parent], row, tokens[parent]]
        tokens.append(int(law.argsort(descending=True)[shape.parents[:at].count(parent)]))
    return tokens[1:]


@pytest.mark.parametrize("more", [0, 2])
@pytest.mark.parametrize("shape", TREES.values(), ids=TREES)
def test_every_token_is_choice_of_its_rank(shape, more):
    growth = Growth(shape, steps=shape.max_depth + more).run()
    tokens, parents = growth.tree.kept()
    assert parents.tolist() == [list(shape.parents)] * ROWS
    assert tokens.tolist() == [choices(growth, shape, row) for row in range(ROWS)]


def test_unordered_tree_is_drafted_by_depth():
    growth = Growth(UNORDERED).run()
    tokens, parents = growth.tree.kept()
    by_depth = UNORDERED.by_depth()
    assert list(by_depth.depths) == sorted(UNORDERED.depths) and by_depth.parents == (0, 0, 1, 2, 2, 3)
    assert parents.tolist() == [list(by_depth.parents)] * ROWS
    assert tokens.tolist() == [choices(growth, by_depth, row) for row in range(ROWS)]


@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_paths_stop_at_length_of_row(length):
    shape = TREES["wide and deep"]
    growth = Growth(shape).run()
    tokens, parents = growth.tree.kept(torch.tensor([length, 3]))
    count = sum(0 < depth <= length for depth in shape.depths)
    assert parents.tolist() == [[*shape.parents[:count], *[-1] * (10 - count)], list(shape.parents)]
    assert torch.equal(tokens[:, :count], growth.tree.kept().draft_tokens[:2, :count])


def test_mapped_tokens_are_target_tokens():
    token_map = torch.arange(VOCAB).flip(0) * 5
    mapped, plain = Growth(DraftTree.from_paths([(0,), (1,)]), token_map=token_map), Growth(TREES["a chain"])
    mapped.tree.grow(plain.logits())
    assert torch.equal(mapped.tree.kept().draft_tokens, token_map[plain.logits()[:, 0].topk(2).indices])


def test_graph_grows_trees_of_each_replay():
    shape = TREES["wide and deep"]
    assert all(map(torch.equal, Growth(shape).replayed().tree.kept(), Growth(shape).run().tree.kept()))


def test_tree_deeper_than_draft_steps_is_rejected():
    with pytest.raises(BatchError, match="at most 2 deep, the draft's steps, got a path of 3 tokens"):
        Growth(TREES["wide and deep"], steps=2)
