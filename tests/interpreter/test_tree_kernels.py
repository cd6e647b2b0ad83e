"""Kernels of draft trees, against the torch reference of their ops."""

import math

import pytest
import torch

from builders.kernels.triton_runtime import torch_implementations
from spec_decode.trees import DraftTree, DynamicTree, DynamicTreeConfig, move_accepted_kv
from spec_decode.trees.kernels.ancestor_masks import ancestor_masks
from spec_decode.trees.kernels.follow_tree import follow_tree
from spec_decode.trees.kernels.keep_best import keep_best
from spec_decode.trees.kernels.place_frontier import place_frontier
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


@pytest.mark.parametrize("value_dim", [8, 12])
def test_moved_keys_and_values_are_the_references(value_dim):
    caches = [torch.randn(9, 2, 4, dim, generator=generator(dim)).transpose(1, 2) for dim in (8, value_dim)]
    slots = torch.randperm(36, generator=generator(0)).view(4, 9)
    slots[0, 3], slots[1, 2] = -1, 36
    path = torch.tensor([[3, 4, 8], [1, 5, 6], [2, 3, 4], [7, -1, -1]])
    by_kernel, by_torch = ([cache.clone() for cache in caches] for _ in range(2))
    move_accepted_kv(*by_kernel, slots, path)
    with torch_implementations():
        move_accepted_kv(*by_torch, slots, path)
    assert same(by_kernel, by_torch) and not same(by_kernel, caches)


@pytest.mark.parametrize(("vocab", "width"), [(4, 4), (40, 3), (1300, 8), (9000, 2)])
@pytest.mark.parametrize("grain", [0.0, 1.0], ids=["all unlike", "many alike"])
def test_top_children_are_the_references(vocab, width, grain):
    logits = torch.randn(3, vocab, generator=generator(vocab)) * 3
    logits = logits.round() if grain else logits
    found = top_children(logits, width)
    with torch_implementations():
        expected = top_children(logits, width)
    assert torch.equal(found[0], expected[0]) and torch.allclose(found[1], expected[1], atol=1e-6)


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


@pytest.mark.parametrize(("width", "steps"), [(1, 2), (3, 4), (8, 9)])
def test_a_placed_frontier_is_the_references(width, steps):
    queries, size = width * (steps - 1), 70
    seq_lens = torch.tensor([0, 9, 30, 0, 4, 5, 6, 7], dtype=torch.int32)
    first = seq_lens.long()[:, None] * 3

    def buffers():
        positions = (first + torch.arange(queries)).where(seq_lens[:, None] > 0, 0)
        masks, ids = torch.full((2, ROWS, queries), 77)
        return ids, torch.full((ROWS, queries, size), math.inf), positions, masks

    by_kernel, by_torch, step = buffers(), buffers(), torch.zeros(1, dtype=torch.int64)
    for at in range(steps):
        step.fill_(at)
        tokens, places = whole(0, 99, (ROWS, width), at), whole(0, width, (ROWS, width), 100 + at)
        hidden = torch.randn(ROWS, queries if at else 1, size + 2, generator=generator(at))[..., 1:-1]
        place_frontier(step, tokens, places, hidden, seq_lens, *by_kernel)
        with torch_implementations():
            place_frontier(step, tokens, places, hidden, seq_lens, *by_torch)
        assert same(by_kernel, by_torch)


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
