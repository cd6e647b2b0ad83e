"""Trees of blocks, compared with a search over all paths in plain Python."""

import heapq
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from builders import BatchError
from spec_decode.graphs.emulator import EmulatedRuntime
from spec_decode.trees import BlockTree, DraftTree, DynamicTreeConfig
from spec_decode.trees.kernels.best_paths import best_paths
from tests.spec_decode.trees.tree_helpers import TREES

ROWS, VOCAB, PLACES = 3, 7, 4
DYNAMIC, STATIC = DynamicTreeConfig(width=3, num_tokens=15), TREES["wide and deep"]


def make_tree(shape=DYNAMIC, rows=ROWS, places=PLACES, **options):
    return BlockTree(rows, shape, num_speculative_tokens=places, device=torch.device("cpu"), **options)


def noisy(rows=ROWS, places=PLACES, seed=0):
    return torch.randn(rows * places, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def lens(*values):
    return torch.tensor(values, dtype=torch.int32)


def paths_of(tree, row):
    """A row's draft tokens, each as its path from the root."""
    found = [()]
    for token, parent in zip(tree.draft_tokens[row].tolist(), tree.parents[row].tolist(), strict=True):
        if parent < 0:
            break
        found.append((*found[parent], token))
    return found[1:]


def best_of(laws, width, count):
    """The best paths of log-probabilities [K, V], and their scores, by a search that never looks at a parent."""
    places = len(laws)
    best = [heapq.nlargest(width, range(VOCAB), key=laws[place].__getitem__) for place in range(places)]
    scored, level = [], [((), 0.0)]
    for place in range(places):
        level = [((*path, token), score + laws[place][token]) for path, score in level for token in best[place]]
        scored += level
    return heapq.nlargest(count, scored, key=lambda each: each[1])


@pytest.mark.parametrize(("width", "count"), [(1, 4), (2, 30), (3, 15), (7, 63)])
def test_tree_has_most_probable_paths_best_first(width, count):
    tree, logits = make_tree(DynamicTreeConfig(width=width, num_tokens=count)), noisy()
    tree.grow(logits, lens(PLACES, PLACES, 99))
    laws = logits.view(ROWS, PLACES, VOCAB).double().log_softmax(-1)
    for row in range(ROWS):
        assert paths_of(tree, row) == [path for path, _ in best_of(laws[row].tolist(), width, count)]


def test_paths_are_scored_at_clamped_temperature():
    """The request's temperature, but at least one half."""
    tree, scaled, logits, depths = make_tree(), make_tree(), noisy(), lens(*[PLACES] * ROWS)
    tree.grow(logits, depths, torch.tensor([0.0, 0.4, 1.7]))
    scaled.grow(logits / torch.tensor([0.5, 0.5, 1.7]).repeat_interleave(PLACES)[:, None], depths)
    assert torch.equal(tree.draft_tokens, scaled.draft_tokens) and torch.equal(tree.parents, scaled.parents)
    scaled.grow(logits, depths)
    assert not torch.equal(tree.draft_tokens[0], scaled.draft_tokens[0])


def test_static_tree_tokens_are_choices_of_their_places():
    tree, logits = make_tree(STATIC), noisy()
    tree.grow(logits, lens(*[PLACES] * ROWS))
    order = logits.view(ROWS, PLACES, VOCAB).sort(dim=-1, descending=True).indices
    for row in range(ROWS):
        expected = [()]
        for at, parent in enumerate(STATIC.parents):
            place, rank = len(expected[parent]), STATIC.parents[:at].count(parent)
            expected.append((*expected[parent], int(order[row, place, rank])))
        assert paths_of(tree, row) == expected[1:]


@pytest.mark.parametrize("shape", [DYNAMIC, STATIC], ids=["dynamic", "static"])
def test_row_has_paths_up_to_its_length(shape):
    tree, whole, logits = make_tree(shape), make_tree(shape), noisy()
    tree.grow(logits, lens(2, 0, -3))
    whole.grow(logits, lens(*[PLACES] * ROWS))
    assert paths_of(tree, 1) == paths_of(tree, 2) == [] and tree.parents[1:].eq(-1).all()
    assert tree.draft_tokens[1:].eq(-1).all() and max(len(path) for path in paths_of(tree, 0)) == 2
    kept = [path for path in paths_of(whole, 0) if len(path) <= 2]
    assert paths_of(tree, 0)[: len(kept)] == kept


def test_unordered_static_tree_is_cut_after_its_depth():
    tree = make_tree(DraftTree((0, 1, 2, 0)))
    tree.grow(noisy(), lens(1, 2, 3))
    assert [len(paths_of(tree, row)) for row in range(ROWS)] == [2, 3, 4]


@pytest.mark.parametrize("shape", [DYNAMIC, STATIC], ids=["dynamic", "static"])
def test_mapped_tokens_are_target_tokens(shape):
    token_map = torch.tensor([90, 80, 70, 60, 50, 40, 30])
    mapped, own, logits = make_tree(shape, token_map=token_map), make_tree(shape), noisy()
    for tree in (mapped, own):
        tree.grow(logits, lens(*[PLACES] * ROWS))
    assert torch.equal(mapped.parents, own.parents)
    assert torch.equal(mapped.draft_tokens, token_map[own.draft_tokens])


def test_impossible_token_is_in_no_tree():
    logits = noisy()
    logits[:, 2:] = -math.inf
    tree = make_tree(DynamicTreeConfig(width=3, num_tokens=39))
    tree.grow(logits, lens(*[PLACES] * ROWS))
    assert all(len(paths_of(tree, row)) == 2 + 4 + 8 + 16 for row in range(ROWS))
    assert tree.draft_tokens.max() == 1


def choices():
    """Places of as many choices each, best first, whose scores are few, so that many are equal."""
    score = st.sampled_from([0.0, -0.5, -1.0, -2.0, -math.inf])
    return st.integers(1, 3).flatmap(
        lambda width: st.lists(
            st.lists(score, min_size=width, max_size=width).map(lambda own: sorted(own, reverse=True)),
            min_size=1,
            max_size=4,
        )
    )


@given(choices(), st.integers(0, 5), st.integers(1, 63))
def test_equal_paths_prefer_shallow_then_rank_then_parent(drawn, depth, count):
    places, width = len(drawn), len(drawn[0])
    ranks = torch.arange(width).expand(1, places, width)
    draft_tokens, parents = torch.full((2, 1, count), 7)
    best_paths(ranks.contiguous(), torch.tensor([drawn]), lens(depth), draft_tokens, parents)
    scores = {(): 0.0}
    for place in range(min(places, depth)):
        above = [path for path in scores if len(path) == place]
        scores |= {(*path, rank): scores[path] + drawn[place][rank] for path in above for rank in range(width)}
    left = {path for path in scores if path and scores[path] > -math.inf}
    taken = [()]
    while left and len(taken) <= count:
        known = [path for path in left if path[:-1] in taken]
        taken.append(min(known, key=lambda path: (-scores[path], len(path), path[-1], taken.index(path[:-1]))))
        left.remove(taken[-1])
        # None that is left, its parent taken or not, is better.
        assert all(scores[path] <= scores[taken[-1]] for path in left)
    end = [-1] * (count + 1 - len(taken))
    assert draft_tokens[0].tolist() == [path[-1] for path in taken[1:]] + end
    assert parents[0].tolist() == [taken.index(path[:-1]) for path in taken[1:]] + end


@pytest.mark.parametrize("shape", [DYNAMIC, STATIC], ids=["dynamic", "static"])
def test_graph_makes_trees_of_each_replay(shape):
    expected, tree = make_tree(shape), make_tree(shape)
    logits, depths = torch.zeros(ROWS * PLACES, VOCAB), lens(PLACES, PLACES, PLACES)
    graph = EmulatedRuntime().capture(lambda: tree.grow(logits, depths))
    logits.copy_(noisy(seed=1))
    depths.copy_(lens(4, 2, 0))
    graph.replay()
    expected.grow(logits, depths)
    assert torch.equal(tree.draft_tokens, expected.draft_tokens) and torch.equal(tree.parents, expected.parents)
    assert paths_of(tree, 0) != []


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        (DraftTree.chain(3), {"places": 2}, "at most 2 deep, the draft's steps, got a path of 3"),
        (
            DynamicTreeConfig(width=2, num_tokens=7),
            {"places": 2},
            "num_tokens is 7, more than the 6 paths of 2 tokens with 2 choices",
        ),
        (
            DynamicTreeConfig(width=1, num_tokens=5),
            {"places": 4},
            "num_tokens is 5, more than the 4 paths of 4 tokens with 1 choices",
        ),
    ],
)
def test_shape_that_does_not_fit_block_is_rejected(shape, options, message):
    with pytest.raises(BatchError, match=message):
        make_tree(shape, **options)


def test_tree_may_be_wider_than_a_frontier():
    tree = make_tree(DynamicTreeConfig(width=64, num_tokens=63), places=16)
    tree.grow(torch.randn(ROWS * 16, 70), lens(16, 16, 16))
    assert tree.draft_tokens.min() >= 0


WRONG = {
    "more rows": ((noisy(rows=4), lens(4, 4, 4, 4)), "at most 3 trees and at least 3 tokens, got 4 trees of 7 tokens"),
    "fewer tokens": ((noisy()[:, :2], lens(4, 4, 4)), "at least 3 tokens, got 3 trees of 2 tokens"),
    "fewer depths": ((noisy(), lens(4, 4)), "logits must be"),
    "depths of another dtype": ((noisy(), torch.tensor([4, 4, 4])), "depths must be"),
    "fewer temperatures": ((noisy(), lens(4, 4, 4), torch.ones(2)), "temperature must be"),
    "temperatures of another dtype": ((noisy(), lens(4, 4, 4), torch.ones(ROWS).double()), "temperature must be"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_tensors_of_other_trees_are_refused(arguments, message):
    tree = make_tree()
    with pytest.raises(BatchError, match=message):
        tree.grow(*arguments)
    assert tree.parents.eq(-1).all()
