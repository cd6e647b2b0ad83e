"""Dynamic trees, compared with the whole tree of every path, scored in plain Python."""

import heapq
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from builders import BatchError
from spec_decode.trees import DraftTree, DynamicTree, DynamicTreeConfig
from spec_decode.trees.kernels.keep_best import KeepBest, keep_best
from spec_decode.trees.kernels.top_children import top_children
from tests.spec_decode.trees.tree_helpers import TableGrowth

ROWS, VOCAB = 3, 7


class Growth(TableGrowth):
    """Of a dynamic tree of W choices and K steps."""

    def __init__(self, width, steps, seed=0, num_tokens=None):
        super().__init__(ROWS, VOCAB, steps, seed)
        self.table *= 2
        candidates = width + (steps - 1) * width * width
        config = DynamicTreeConfig(width=width, num_tokens=num_tokens or candidates)
        self.tree = DynamicTree(ROWS, self.step, config, num_speculative_tokens=steps)

    def paths(self, row):
        """Each candidate's tokens from the root on, and its score."""
        found = []
        for token, parent in zip(self.tree.tokens[row].tolist(), self.tree.parents[row].tolist(), strict=True):
            found.append((*(found[parent] if parent >= 0 else ()), token))
        return list(zip(found, self.tree.scores[row].tolist(), strict=True))


def best_paths(growth, row):
    """What EAGLE-2 drafts: of each step's W best paths, the W best children each."""
    laws, found, frontier = growth.table[:, row].double().log_softmax(-1), [], [((), 0.0)]
    for step in range(growth.steps):
        grown = []
        for path, score in frontier:
            law = laws[step, path[-1] if path else 0].tolist()
            best = heapq.nlargest(growth.tree.width, range(VOCAB), key=lambda token, law=law: law[token])
            grown += [((*path, token), score + law[token]) for token in best]
        found += grown
        frontier = heapq.nlargest(growth.tree.width, grown, key=lambda each: each[1])
    return found


@pytest.mark.parametrize(("width", "steps"), [(1, 3), (2, 1), (3, 4), (7, 2)])
def test_best_children_become_candidates_and_frontier(width, steps):
    growth = Growth(width, steps).run()
    last = width * width if steps > 1 else width
    for row in range(ROWS):
        expected, found = best_paths(growth, row), growth.paths(row)
        assert [path for path, _ in found] == [path for path, _ in expected]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-5)
        best = sorted(range(len(found) - last, len(found)), key=lambda at: -found[at][1])[:width]
        assert growth.tree.frontier[row].tolist() == best
        assert growth.tree.frontier_tokens[row].tolist() == [found[at][0][-1] for at in best]
        assert growth.tree.frontier_scores[row].tolist() == [found[at][1] for at in best]
        assert growth.tree.frontier_places[row].tolist() == [(at - len(found) + last) // width for at in best]


def test_paths_are_scored_at_clamped_temperature():
    """The request's temperature, but at least one half."""
    growth, scaled = Growth(3, 4), Growth(3, 4)
    temperature = torch.tensor([0.0, 0.4, 1.7])
    for step in range(4):
        for each in (growth, scaled):
            each.step.fill_(step)
        assert torch.equal(growth.tree.frontier_tokens, scaled.tree.frontier_tokens)
        growth.tree.grow(growth.logits(), temperature=temperature)
        scaled.tree.grow(scaled.logits() / torch.tensor([0.5, 0.5, 1.7])[:, None, None])
    assert torch.equal(growth.tree.scores, scaled.tree.scores)
    assert all(map(torch.equal, growth.tree.kept(), scaled.tree.kept()))


def test_choices_map_to_tokens_of_each_row():
    growth, mapped = Growth(3, 2), Growth(3, 2)
    choices = torch.stack([torch.randperm(VOCAB, generator=torch.Generator().manual_seed(row)) for row in range(ROWS)])
    for each, own in ((growth, None), (mapped, choices)):
        each.tree.grow(growth.logits(), own)
    assert torch.equal(mapped.tree.frontier_tokens, choices.gather(1, growth.tree.frontier_tokens))
    assert torch.equal(mapped.tree.tokens[:, :3], choices.gather(1, growth.tree.tokens[:, :3]))


@pytest.mark.parametrize("count", [1, 5, 20, 30])
def test_kept_tree_has_the_best_paths(count):
    growth = Growth(3, 4, num_tokens=count).run()
    draft_tokens, parents = growth.tree.kept()
    for row in range(ROWS):
        paths = growth.paths(row)
        best = sorted(range(len(paths)), key=lambda at: -paths[at][1])[:count]
        tree, found = DraftTree(tuple(parents[row].tolist())), [()]
        for token, parent in zip(draft_tokens[row].tolist(), tree.parents, strict=True):
            found.append((*found[parent], token))
        assert found[1:] == [paths[at][0] for at in sorted(best)]


def scored_trees():
    """Candidates of any shape whose scores are steps down from their parents', many of them 0."""
    steps = st.sampled_from([0.0, 0.0, -1.0, -2.0, -math.inf])
    return st.lists(st.tuples(st.integers(-1, 2**20), steps), min_size=1, max_size=40)


@given(scored_trees(), st.integers(1, 45))
def test_kept_token_has_its_path_kept(drawn, count):
    parents, scores = [], []
    for at, (parent, step) in enumerate(drawn):
        parents.append(parent % (at + 1) - 1 if at else -1)
        scores.append(step + (scores[parents[-1]] if parents[-1] >= 0 else 0.0))
    tokens = torch.arange(len(drawn))[None]
    draft_tokens, tree = keep_best(tokens, torch.tensor([parents]), torch.tensor([scores]), count)
    kept = [token for token in draft_tokens[0].tolist() if token >= 0]
    alive = sorted((at for at in range(len(drawn)) if scores[at] > -math.inf), key=lambda at: (-scores[at], at))
    assert kept == sorted(alive[:count])
    follows = [0 if parents[token] < 0 else 1 + kept.index(parents[token]) for token in kept]
    assert tree[0].tolist() == follows + [-1] * (count - len(kept))


def test_equal_logits_are_taken_in_order():
    tokens, scores = top_children(torch.zeros(2, 5), 3, None)
    assert tokens.tolist() == [[0, 1, 2]] * 2
    assert scores.flatten().tolist() == pytest.approx([-math.log(5)] * 6)


@pytest.mark.parametrize("view", [lambda x: x[:, ::2], lambda x: x[:, :40].bfloat16()], ids=["strided", "bfloat16"])
def test_children_are_the_most_probable_tokens(view):
    logits = view(torch.randn(4, 80, generator=torch.Generator().manual_seed(0)))
    tokens, scores = top_children(logits, 6, None)
    assert torch.equal(tokens, logits.double().sort(dim=1, descending=True, stable=True).indices[:, :6])
    assert torch.allclose(scores.double(), logits.double().log_softmax(-1).gather(1, tokens), atol=1e-5)


def test_impossible_token_has_no_probability():
    logits = torch.tensor([[0.0, -math.inf, math.nan, -math.inf], [math.nan] * 4])
    tokens, scores = top_children(logits, 3, None)
    assert tokens[0, 0] == 0 and scores.tolist() == [[0.0, -math.inf, -math.inf], [-math.inf] * 3]
    assert ((tokens >= 0) & (tokens < 4)).all()


def test_no_score_is_above_0():
    logits = torch.tensor([[200.0, 0.0, 0.0], [1e-8, 0.0, 0.0]])
    assert (top_children(logits, 3, None)[1] <= 0).all()


def test_keep_best_compares_candidates_within_triton_limit(monkeypatch):
    # W = 64 of 6 places: too many to rank in the interpreter.
    tokens, options = torch.zeros(1, 64 + 5 * 64 * 64, dtype=torch.int64), {}
    monkeypatch.setattr("spec_decode.trees.kernels.keep_best._keep_best_kernel", {(1,): options.update})
    KeepBest(tokens, tokens, tokens.float(), 9).launch()
    assert options["BLOCK_C"] * options["CHUNK"] <= 2**20


def test_graph_grows_trees_of_each_replay():
    expected, growth = Growth(3, 3, seed=1).run(), Growth(3, 3, seed=1).replayed()
    assert growth.tree.frontier_scores.equal(expected.tree.frontier_scores)
    assert all(map(torch.equal, growth.tree.kept(), expected.tree.kept()))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"width": 0}, "width must be an integer from 1 to 64, got 0"),
        ({"width": 3.0}, "width must be an integer from 1 to 64, got 3.0"),
        ({"width": 3, "num_tokens": 0}, "1 to 63 draft tokens"),
        ({"width": 8, "num_tokens": 64}, "1 to 63 draft tokens"),
    ],
)
def test_invalid_tree_sizes_are_rejected(sizes, message):
    with pytest.raises(BatchError, match=message):
        DynamicTreeConfig(**{"num_tokens": 4, **sizes})


@pytest.mark.parametrize(
    ("steps", "config", "message"),
    [
        (
            2,
            DynamicTreeConfig(width=2, num_tokens=7),
            "num_tokens is 7, more than the 6 paths of 2 tokens with 2 choices",
        ),
        (3, DynamicTreeConfig(width=2, num_tokens=11), "num_tokens is 11, more than the 10 candidates"),
    ],
)
def test_tree_not_fitting_steps_is_rejected(steps, config, message):
    with pytest.raises(BatchError, match=message):
        DynamicTree(1, torch.zeros(1, dtype=torch.int64), config, num_speculative_tokens=steps)


FRONTIER = f"1 to {ROWS} rows, of the root or the 3 tokens of a frontier, got"


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((ROWS + 1, 1, VOCAB), FRONTIER),
        ((ROWS, 2, VOCAB), FRONTIER),
        ((0, 3, VOCAB), FRONTIER),
        ((ROWS, 1, 2), "at least 3 tokens, one per choice, got 2"),
        ((ROWS, VOCAB), "logits must be"),
    ],
)
def test_misfit_logits_are_rejected(shape, message):
    with pytest.raises(BatchError, match=message):
        Growth(3, 2).tree.grow(torch.zeros(shape))


@pytest.mark.parametrize(("before", "length", "count"), [(0, 0, 0), (0, 1, 3), (0, 2, 12), (3, 1, 3), (3, 2, 12)])
def test_early_end_keeps_paths_up_to_row_length(before, length, count):
    whole, early = Growth(3, 3, num_tokens=20).run(), Growth(3, 3, num_tokens=20).run(before).run(length)
    tokens, parents = early.tree.kept()
    assert torch.equal(tokens[:, :count], early.tree.tokens[:, :count]) and parents[:, :count].ge(0).all()
    assert tokens[:, count:].eq(-1).all() and parents[:, count:].eq(-1).all()
    found, kept = whole.tree.kept(torch.tensor([length, 3, length])), whole.tree.kept()
    assert all(torch.equal(mine[1], its[1]) for mine, its in zip(found, kept, strict=True))
    assert all(torch.equal(mine[::2], its[::2]) for mine, its in zip(found, (tokens, parents), strict=True))


def test_trees_of_first_rows_match_all_rows():
    few, all_rows = Growth(3, 3), Growth(3, 3).run()
    for step in range(3):
        few.step.fill_(step)
        few.tree.grow(few.logits()[:2])
    lens = torch.tensor([3, 3])
    assert all(map(torch.equal, few.tree.kept(lens), (each[:2] for each in all_rows.tree.kept())))


def test_mapped_tokens_are_target_tokens():
    token_map = torch.tensor([11, 3, 8, 0, 19, 4, 6])
    mapped, plain = Growth(3, 3), Growth(3, 3).run()
    config = DynamicTreeConfig(width=3, num_tokens=9)
    mapped.tree = DynamicTree(ROWS, mapped.step, config, num_speculative_tokens=3, token_map=token_map)
    for step in range(3):
        mapped.step.fill_(step)
        last = mapped.tree.frontier_tokens
        if step:
            mapped.tree.frontier_tokens = (last[..., None] == token_map).long().argmax(-1)
        logits, mapped.tree.frontier_tokens = mapped.logits(), last
        mapped.tree.grow(logits)
    assert torch.equal(mapped.tree.tokens, token_map[plain.tree.tokens])
