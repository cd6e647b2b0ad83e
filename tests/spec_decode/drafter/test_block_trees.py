"""Trees of every kind of block draft, compared with a search over the published models' scores for each path."""

import heapq

import pytest
import torch

from builders import BatchError
from spec_decode.drafter import Strategy, StrategyError
from spec_decode.trees import DraftTree, DynamicTreeConfig
from tests.spec_decode.drafter.test_tree_drafts import best_paths, paths
from tests.spec_decode.models.test_published_drafts import (
    BLOCKS,
    CONTEXT_BLOCKS,
    CONTEXTS,
    DFLASH2S,
    DSPARKS,
    MAX_SEQ_LEN,
    DraftFixture,
    K,
)
from tests.spec_decode.trees.tree_helpers import TREES

DYNAMIC, STATIC = DynamicTreeConfig(width=3, num_tokens=14), TREES["wide and deep"]
# More candidates than a tree has choices
SELECTING = {name: case for name, case in DFLASH2S.items() if name != "causal_dflash2"}
KINDS = BLOCKS | CONTEXT_BLOCKS | DSPARKS | SELECTING
AT_ONCE, IN_TURN = "dflash_with_all_that_is_optional", "dspark_with_all_that_is_optional"
OF_EACH_CLASS = ("p_eagle", "pard", AT_ONCE, "dflash_from_the_anchor", IN_TURN, "dflash2")
FROM_ANOTHER_PLACE = (
    "dspark_after_the_anchor",
    "dflash2_from_the_anchor",
    "dflash2_of_mixed_layers_with_all_that_is_optional",
)
CAPTURED = [Strategy.PER_STEP, Strategy.FULL_LOOP]
"""All that a draft without later steps can be captured in, in the same graph; pieces ask for another mode."""


def make(name, folder, strategy=Strategy.FULL_LOOP, tree=DYNAMIC, **options):
    return DraftFixture(KINDS[name], folder, strategy, tree=tree, **options)


class Laws:
    """The published model's log-probabilities, fp64 [V], of the token after a request's text and a path, at the
    request's temperature; of a greedy one at 1/2."""

    def __init__(self, name, fixture, request):
        model, (ids, target_states) = fixture.model, fixture.inputs(request)
        self.temperature = max(0.5, float(fixture.verified.temperature[request]))
        self.shift = None
        case, self.last = KINDS[name], ids[-1]
        published = case.oracle(case.checkpoint, fixture.target, case.layers, torch.float64)
        if name in BLOCKS | CONTEXT_BLOCKS:
            self.scores, _ = published.drafts(ids, target_states, K)
            return
        tensors, states = published.tensors, published.places(self.last, target_states, K)
        unary = states @ published.head.T
        if name in SELECTING:
            kth = unary.sort(-1, descending=True).values[:, model.num_candidates - 1, None]
            self.scores = unary.masked_fill(unary < kth, -torch.inf)
            gates = states @ tensors["candidate_selector.hidden_projection.weight"].T
            before, behind = (tensors[f"candidate_selector.{part}_codebook"] for part in ("predecessor", "successor"))
            self.shift = (before * gates[:, None]) @ behind.T
        else:
            self.scores = published.whole(unary)
            rows = tensors["markov_head.markov_w1.weight"] @ tensors["markov_head.markov_w2.weight"].T
            self.shift = [published.whole(rows).nan_to_num(neginf=0.0)] * K

    def law(self, path):
        """Log-probabilities of the token after these."""
        scores = self.scores[len(path)]
        if self.shift is not None:
            scores = scores + self.shift[len(path)][path[-1] if path else self.last]
        return (scores / self.temperature).log_softmax(-1)

    def expected(self, tree, steps=K):
        """The paths of a tree, in the order of its draft tokens."""
        if isinstance(tree, DraftTree):
            return [path for path in self.ranked(tree) if len(path) <= steps]
        if self.shift is not None:
            return best_paths(self, tree.width, tree.num_tokens, steps)
        # No path is more probable than the one that it goes on from.
        best = [self.law((0,) * place).topk(tree.width) for place in range(steps)]
        found, open_ = [], [(0.0, ())]
        while open_ and len(found) <= tree.num_tokens:
            missing, path = heapq.heappop(open_)
            found.append(path)
            if len(path) < steps:
                for log, token in zip(*(each.tolist() for each in best[len(path)]), strict=True):
                    heapq.heappush(open_, (missing - log, (*path, token)))
        return found[1:]

    def ranked(self, tree):
        """The paths of a tree's shape, a depth after the other."""
        found = [()]
        for at, parent in enumerate(tree.parents):
            rank = tree.parents[:at].count(parent)
            found.append((*found[parent], int(self.law(found[parent]).topk(rank + 1).indices[rank])))
        return sorted(found[1:], key=len)


@pytest.mark.parametrize(
    ("name", "tree"),
    [
        *((name, tree) for name in OF_EACH_CLASS for tree in (DYNAMIC, STATIC)),
        *((n, DYNAMIC) for n in FROM_ANOTHER_PLACE),
    ],
)
def test_block_tree_has_most_probable_paths(name, tree, tmp_path):
    fixture = make(name, tmp_path, tree=tree)
    fixture.verified = fixture.verified._replace(temperature=torch.tensor([0.0, 0.8, 1.3]))
    fixture.prefill()
    laws, own = [Laws(name, fixture, row) for row in range(len(CONTEXTS))], torch.tensor([0, 2, 99], dtype=torch.int32)
    for steps, lens, depths in (
        (K, None, (K,) * 3), (K, own, (0, 2, K)), (3, None, (3,) * 3), (0, None, (0,) * 3), (1, None, (1,) * 3),
    ):  # fmt: skip
        drafts = fixture.drafter.propose(fixture.verified._replace(draft_lens=lens), steps)
        assert drafts.logits.shape[:2] == (len(CONTEXTS), 0)
        for row, (law, depth) in enumerate(zip(laws, depths, strict=True)):
            assert paths(drafts, row) == (law.expected(tree, depth) if depth else []), f"request {row}, {steps} steps"

    (graph,) = fixture.drafter._capturables()
    assert graph == "step_0" and fixture.drafter.metadata_in_use().keys() == {0}

    fixture.tables.load(fixture.pages, [MAX_SEQ_LEN, CONTEXTS[1] + 1, MAX_SEQ_LEN])
    drafts = fixture.drafter.propose(fixture.verified)
    assert paths(drafts, 1) == [] and drafts.tokens[1].eq(-1).all()
    assert paths(drafts, 2) == laws[2].expected(tree)
    assert fixture.tables.overflow.tolist() == [0, 1, 0]


def rounds(fixture, temperature, count=3):
    """Tokens and parents of consecutive rounds, each from where the last one's kept tokens end; in the last, of lengths
    that the requests ask for."""
    found = []
    for round_ in range(count):
        verified = fixture.verified._replace(temperature=torch.full((len(CONTEXTS),), temperature))
        if round_:
            kept = verified.context_lens + verified.accepted + 1
            verified = verified._replace(
                token_ids=verified.token_ids.roll(round_, 0),
                context_lens=kept,
                accepted=verified.accepted.roll(1),
                next_tokens=verified.next_tokens.roll(1),
                draft_lens=torch.tensor([0, 2, 99], dtype=torch.int32) if round_ == count - 1 else None,
            )
        fixture.verified = verified
        drafts = fixture.drafts() if round_ == 0 else fixture.drafter.propose(verified)
        found.append((drafts.tokens.clone(), drafts.parents.clone()))
    return found


@pytest.mark.parametrize(
    ("name", "tree", "temperature"),
    [
        *((name, DYNAMIC, 1.0) for name in ("pard", AT_ONCE, IN_TURN, "dflash2")),
        *((name, STATIC, 0.0) for name in ("p_eagle", "dflash_from_the_anchor", IN_TURN, "dflash2")),
    ],
)
def test_every_strategy_drafts_same_bits_as_eager(name, tree, temperature, tmp_path):
    eager = rounds(make(name, tmp_path / "eager", Strategy.EAGER, tree), temperature)
    assert not all(map(torch.equal, eager[0], eager[1]))
    for strategy in CAPTURED if name == IN_TURN else CAPTURED[1:]:
        fixture = make(name, tmp_path / strategy.value, strategy, tree)
        for round_, (found, wanted) in enumerate(zip(rounds(fixture, temperature), eager, strict=True)):
            assert all(map(torch.equal, found, wanted)), f"{strategy}, round {round_}"
        assert fixture.drafter.plan.strategy is strategy and fixture.drafter.graphs.complete


@pytest.mark.parametrize(
    ("name", "tree", "message"),
    [
        (AT_ONCE, DraftTree.chain(K + 1), f"at most {K} deep, the draft's steps, got a path of {K + 1}"),
        (AT_ONCE, DynamicTreeConfig(width=1, num_tokens=5), "more than the 4 paths of 4 tokens with 1 choices"),
        (IN_TURN, DynamicTreeConfig(width=2, num_tokens=15), "more than the 14 candidates of 4 steps with 2 choices"),
        ("dflash2", DynamicTreeConfig(width=2, num_tokens=15), "more than the 14 candidates of 4 steps with 2 choices"),
        (
            "dflash2",
            DynamicTreeConfig(width=6, num_tokens=9),
            "at most 5 choices after a token, all that the draft has, got 6",
        ),
        *(
            (name, tree, "at most 24 choices after a token, all that the draft has, got 25")
            for name in ("p_eagle", AT_ONCE, IN_TURN)
            for tree in (DynamicTreeConfig(width=25, num_tokens=9), DraftTree((0,) * 25))
        ),
    ],
)
def test_unsuitable_block_trees_are_rejected(name, tree, message, tmp_path):
    with pytest.raises(BatchError, match=message):
        make(name, tmp_path, tree=tree)


def test_independent_block_fills_larger_tree_than_steps(tmp_path):
    tree = DynamicTreeConfig(width=2, num_tokens=30)
    fixture = make(AT_ONCE, tmp_path, tree=tree)
    assert paths(fixture.drafts(), 0) == Laws(AT_ONCE, fixture, 0).expected(tree)


@pytest.mark.parametrize("name", [AT_ONCE, IN_TURN])
def test_block_tree_may_exceed_frontier_width(name, tmp_path):
    tree = DynamicTreeConfig(width=23, num_tokens=63)
    fixture = make(name, tmp_path, tree=tree)
    assert paths(fixture.drafts(), 2) == Laws(name, fixture, 2).expected(tree)


@pytest.mark.parametrize("name", ["p_eagle", AT_ONCE, IN_TURN])
def test_block_tree_rejects_strategy_of_later_steps(name, tmp_path):
    with pytest.raises(StrategyError, match="this draft proposes all its tokens in one step"):
        make(name, tmp_path, Strategy.DEVICE_LOOP)
