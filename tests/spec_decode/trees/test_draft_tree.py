import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from builders import BatchError
from spec_decode.trees import MAX_TREE_TOKENS, DraftTree, DynamicTreeConfig
from spec_decode.trees.draft_tree import require_frontiers
from spec_decode.verification import TreeSampling


@st.composite
def trees(draw):
    count = draw(st.integers(1, MAX_TREE_TOKENS - 1))
    return DraftTree(tuple(draw(st.integers(0, i)) for i in range(count)))


def paths_of(tree):
    """The path of each draft token, by ranks among its siblings."""
    paths, children = [()], {}
    for token, parent in enumerate(tree.parents, 1):
        children.setdefault(parent, []).append(token)
        paths.append((*paths[parent], len(children[parent]) - 1))
    return paths[1:]


@given(trees())
def test_depths_and_max_children_follow_the_paths(tree):
    paths = paths_of(tree)
    assert tree.depths == (0, *(len(path) for path in paths)) and tree.max_depth == max(tree.depths)
    assert tree.max_children == 1 + max(path[-1] for path in paths)


@given(trees(), st.randoms())
def test_tree_from_paths_does_not_depend_on_order(tree, random):
    paths = paths_of(tree)
    random.shuffle(paths)
    found = DraftTree.from_paths(paths)
    assert paths_of(found) == sorted(paths, key=lambda path: (len(path), path))


def test_rows_repeat_tree_and_chain_is_one_path():
    assert torch.equal(DraftTree((0, 0, 1)).rows(2, "cpu"), torch.tensor([[0, 0, 1]] * 2))
    assert DraftTree.chain(3).parents == (0, 1, 2)


def test_require_depth_rejects_deeper_tree():
    DraftTree.chain(3).require_depth(3)
    with pytest.raises(BatchError, match=r"at most 2 deep, the draft's steps, got a path of 3"):
        DraftTree.chain(3).require_depth(2)


def test_require_frontiers_rejects_more_than_mask_bits():
    require_frontiers(21, 4)
    with pytest.raises(BatchError, match="at most 64 tokens together, got 22 at each of 3"):
        require_frontiers(22, 4)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ((0, 2), r"so 0 to i, got 2 for draft token 1"),
        ((0, -1), r"got -1 for draft token 1"),
        ((1,), r"got 1 for draft token 0"),
        ((0, 1.0), r"got 1.0 for draft token 1"),
        ((False,), r"got False for draft token 0"),
        ((), r"1 to 63 draft tokens, got 0"),
        (None, r"parents must be a tuple of ints, got None"),
        (3, r"parents must be a tuple of ints, got 3"),
        ("00", r"parents must be a tuple of ints, got '00'"),
        ((0,) * 64, r"1 to 63 draft tokens, got 64"),
    ],
)
def test_parents_that_make_no_tree_are_refused(parents, message):
    with pytest.raises(BatchError, match=message):
        DraftTree(parents)


LACKS = "must list a path's parent and its more probable siblings; "
SHAPE = "must have one or more ranks of 0 or more, got "
RANKS = "must be sequences of ints, the ranks of their tokens, got "


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        pytest.param([(0,), (0,)], r"must list each path once; \(0,\) is repeated", id="twice"),
        pytest.param([(0, 0)], rf"{LACKS}\(0, 0\) lacks \[\(0,\)\]", id="without its parent"),
        pytest.param([(1,)], rf"{LACKS}\(1,\) lacks \[\(0,\)\]", id="without the choice before"),
        pytest.param([(0,), (0, 1)], rf"{LACKS}\(0, 1\) lacks \[\(0, 0\)\]", id="a gap below"),
        pytest.param([()], rf"{SHAPE}\(\)", id="empty"),
        pytest.param([(0,), (-1,)], rf"{SHAPE}\(-1,\)", id="negative"),
        (None, f"{RANKS}None"),
        ([None], f"{RANKS}None"),
        ([(0,), 3], f"{RANKS}3"),
        ([(0.0,)], re.escape(f"{RANKS}(0.0,)")),
    ],
)
def test_paths_that_make_no_tree_are_refused(paths, message):
    with pytest.raises(BatchError, match=message):
        DraftTree.from_paths(paths)


def test_tree_copies_its_parents():
    parents = [0, 1]
    tree = DraftTree(parents)
    parents.append(7)
    assert tree.parents == (0, 1) and hash(tree)


@pytest.mark.parametrize("count", [3.0, "3", True])
def test_token_count_that_is_no_int_is_rejected(count):
    with pytest.raises(BatchError, match=f"a tree's draft tokens must be ints, got {count!r}"):
        DynamicTreeConfig(width=2, num_tokens=count)


@pytest.mark.parametrize(("depth", "message"), [(-1, "1 or more, got -1"), ("x", "ints, got 'x'"), (True, "got True")])
def test_invalid_verification_depth_is_rejected(depth, message):
    with pytest.raises(BatchError, match=f"max_depth must be .*{message}"):
        TreeSampling(depth)
