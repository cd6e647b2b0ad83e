"""Kernels of draft trees, against the torch reference of their ops."""

import math

import pytest
import torch

from builders.kernels.triton_runtime import torch_implementations
from spec_decode.trees import DraftTree, DynamicTree, DynamicTreeConfig
from spec_decode.trees.kernels.ancestor_masks import ancestor_masks
from spec_decode.trees.kernels.follow_tree import follow_tree
from spec_decode.trees.kernels.keep_best import keep_best
from spec_decode.trees.kernels.top_children import top_children

ROWS = 8


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that a launch allocates holds garbage, which must reach no output."""
    empty, new_empty = torch.empty, torch.Tensor.new_empty

    def poison(tensor):
        return tensor.fill_(math.nan if tensor.dtype.is_floating_point else 2**30)

    monkeypatch.setattr(torch, "empty", lambda *shape, **options: poison(empty(*shape, **options)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **options: poison(new_empty(*args, **options)))


def generator(seed):
    return torch.Generator().manual_seed(seed)


def whole(low, high, shape, seed):
    return torch.randint(low, high, shape, generator=generator(seed))


def random_parents(tokens, seed):
    """Trees of every shape up to three children a token, some of which end early."""
    parents = torch.zeros(ROWS, tokens, dtype=torch.int64)
    for row in range(ROWS):
        free = [3] * (1 + tokens)
        for token in range(tokens):
            allowed = [at for at in range(token + 1) if free[at]]
            parent = allowed[int(whole(0, len(allowed), (1,), 1000 * seed + 100 * row + token))]
            free[parent] -= 1
            parents[row, token] = parent
    length = whole(0, 2 * tokens, (ROWS, 1), seed)
    parents = parents.where(torch.arange(tokens) < length, -1)
    # What follows the first -1 is no tree.
    return parents.where(torch.arange(tokens) <= length, 2**40)


def same(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def agrees(op, *arguments):
    found = op(*arguments)
    with torch_implementations():
        return same(found, op(*arguments))


@pytest.mark.parametrize("tokens", [1, 2, 7, 31, 63])
def test_masks_and_depths_are_the_references(tokens):
    assert agrees(ancestor_masks, random_parents(tokens, tokens))
    assert agrees(ancestor_masks, DraftTree.chain(tokens).rows(2, "cpu"))


@pytest.mark.parametrize("tokens", [1, 5, 32, 63])
def test_the_path_is_the_references(tokens):
    parents = random_parents(tokens, tokens)
    drafts, targets = whole(0, 3, (ROWS, tokens), 1), whole(0, 3, (ROWS, 1 + tokens), 2)
    for max_depth in (1, 4, tokens):
        assert agrees(follow_tree, drafts, parents, targets, max_depth)


def test_top_children_of_rows_with_few_tokens_or_none():
    logits = torch.full((3, 700), -math.inf)
    logits[0, 650], logits[0, 3], logits[1] = 1.0, 0.5, math.nan
    tokens, scores = top_children(logits, 3)
    assert tokens[0, :2].tolist() == [650, 3] and ((tokens >= 0) & (tokens < 700)).all()
    assert (scores > -math.inf).tolist() == [[True, True, False], [False] * 3, [False] * 3]


@pytest.mark.parametrize(("width", "steps"), [(1, 3), (3, 3), (5, 2)])
def test_a_grown_tree_is_the_references(width, steps):
    step = torch.zeros(1, dtype=torch.int64)
    config = DynamicTreeConfig(width=width, num_tokens=min(9, width * steps))
    by_kernel, by_torch = (DynamicTree(ROWS, step, config, num_speculative_tokens=steps) for _ in range(2))
    for draw, at in enumerate([*range(steps), *range(steps)]):
        step.fill_(at)
        # So far apart, log-probabilities are exact but for how many share the top.
        logits = whole(-3, 1, (ROWS, width if at else 1, 12), draw).float() * 64
        by_kernel.grow(logits)
        with torch_implementations():
            by_torch.grow(logits)
        for name in ("parents", "frontier", "frontier_tokens", "frontier_places"):
            assert torch.equal(getattr(by_kernel, name), getattr(by_torch, name)), name
        assert torch.equal(by_kernel.scores.isinf(), by_torch.scores.isinf())
    found = keep_best(by_kernel.tokens, by_kernel.parents, by_torch.scores, config.num_tokens)
    with torch_implementations():
        assert same(found, by_torch.kept())


@pytest.mark.parametrize(("candidates", "count"), [(1, 1), (20, 63), (70, 9), (130, 63)])
def test_the_kept_paths_are_the_references(candidates, count):
    parents = torch.stack([whole(-1, 10**6, (candidates,), row) for row in range(ROWS)])
    parents = parents.where(parents < 0, parents % torch.arange(candidates).clamp(min=1))
    parents[:, 0] = -1
    scores = torch.zeros(ROWS, candidates)
    for at in range(candidates):
        down = -whole(0, 3, (ROWS,), at).float()
        above = scores.gather(1, parents[:, at : at + 1].clamp(min=0))[:, 0]
        scores[:, at] = down + torch.where(parents[:, at] >= 0, above, 0.0)
    scores[0, candidates // 2 :] = -math.inf
    assert agrees(keep_best, whole(0, 99, (ROWS, candidates), 5), parents, scores, count)
