"""A drafter of trees, compared with a search over paths that are decoded one by one, token by token."""

import heapq

import pytest
import torch

from attn_backends import get
from builders import BatchError
from spec_decode.drafter import Strategy, StrategyError
from spec_decode.model_api import DraftInputs, ModuleDraft
from spec_decode.paged.attention import PagedAttention
from spec_decode.paged.kv_groups import build_ragged
from spec_decode.trees import DraftTree, DynamicTreeConfig
from tests.spec_decode.drafter.drafter_fixture import (
    CAPTURING,
    CONTEXTS,
    MAX_SEQ_LEN,
    STRATEGIES,
    DrafterFixture,
    K,
    TwoLayerDraft,
    assert_same,
)
from tests.spec_decode.drafter.third_party_backends import DecodeOnly
from tests.spec_decode.trees.tree_helpers import TREES

DYNAMIC, STATIC = DynamicTreeConfig(width=3, num_tokens=10), TREES["wide and deep"]


def trees(tree=DYNAMIC, backends=("triton_paged", "torch_reference"), **options):
    return DrafterFixture([get(name) for name in backends], tree=tree, **options)


def paths(drafts, row):
    """The draft tokens of a row's tree, each as its path from the root."""
    found = [()]
    for token, parent in zip(drafts.tokens[row].tolist(), drafts.parents[row].tolist(), strict=True):
        if parent < 0:
            break
        found.append((*found[parent], token))
    return found[1:]


class Chains:
    """The laws of a request's draft after any path, by plain decoding over the caches of a fixture of its own."""

    def __init__(self, verified, row):
        self.fixture, self.verified, self.row = trees(strategy=Strategy.EAGER), verified, row
        self.fixture.load([row])
        self.start = int(verified.context_lens[row]) + int(verified.accepted[row]) + 1

    def run(self, token_ids, hidden, end):
        fixture = self.fixture
        batch, metadata = build_ragged(fixture.groups, fixture.tables, [len(token_ids)], [end])
        attention = PagedAttention(fixture.groups, metadata)
        return fixture.model.forward(DraftInputs(torch.tensor(token_ids), hidden, batch.positions, attention))[-1:]

    def law(self, path):
        """Log-probabilities [V] of the token after the root and these, at the request's temperature, 1/2 or more."""
        count = int(self.verified.accepted[self.row]) + 1
        ids = [*self.verified.token_ids[self.row, 1:count].tolist(), int(self.verified.next_tokens[self.row])]
        hidden = self.run(ids, self.verified.target_hidden_states[self.row, :count], self.start)
        for at, token in enumerate(path):
            hidden = self.run([token], hidden, self.start + at + 1)
        logits = self.fixture.model.logits(hidden)[0].double()
        return (logits / max(0.5, float(self.verified.temperature[self.row]))).log_softmax(-1)


def best_paths(chains, width, num_tokens, steps=K):
    """What EAGLE-2 keeps, in the order it was drafted in."""
    found, frontier = [], [((), 0.0)]
    for _ in range(steps):
        grown = []
        for path, score in frontier:
            best = chains.law(path).topk(width)
            pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            grown += [((*path, token), score + own) for own, token in pairs]
        found += grown
        frontier = heapq.nlargest(width, grown, key=lambda each: each[1])
    kept = set(heapq.nlargest(num_tokens, range(len(found)), key=lambda at: found[at][1]))
    return [path for at, (path, _) in enumerate(found) if at in kept]


def test_dynamic_tree_has_most_probable_paths():
    fixture = trees(strategy=Strategy.EAGER)
    verified = fixture.verified(temperature=[1.3, 0.0, 0.8])
    drafts = fixture.drafter.propose(verified)
    assert drafts.logits.shape[:2] == (3, 0) and drafts.tokens.shape == drafts.parents.shape == (3, 10)
    for row in range(len(CONTEXTS)):
        assert paths(drafts, row) == best_paths(Chains(verified, row), DYNAMIC.width, DYNAMIC.num_tokens)


def test_static_tree_tokens_are_top_choices():
    fixture = trees(STATIC, strategy=Strategy.EAGER)
    verified = fixture.verified()
    drafts = fixture.drafter.propose(verified)
    for row in range(len(CONTEXTS)):
        chains, expected = Chains(verified, row), [()]
        for at, parent in enumerate(STATIC.parents):
            rank = STATIC.parents[:at].count(parent)
            expected.append((*expected[parent], int(chains.law(expected[parent]).topk(rank + 1).indices[rank])))
        assert paths(drafts, row) == expected[1:]


@pytest.mark.parametrize("tree", [DYNAMIC, STATIC], ids=["dynamic", "static"])
@pytest.mark.parametrize("strategy", CAPTURING)
def test_every_strategy_drafts_like_eager(strategy, tree):
    fixture = trees(tree, strategy=strategy)
    assert_same(fixture.rounds(), trees(tree, strategy=Strategy.EAGER).rounds())
    assert fixture.drafter.plan.strategy is strategy


def test_tree_of_one_step_is_root_children():
    tree = DynamicTreeConfig(width=3, num_tokens=2)
    fixture = trees(tree, steps=1)
    verified = fixture.verified()
    drafts = fixture.drafter.propose(verified)
    for row in range(len(CONTEXTS)):
        expected = Chains(verified, row).law(()).topk(2).indices.tolist()
        assert paths(drafts, row) == [(token,) for token in expected]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_round_of_fewer_steps_has_shallower_trees(strategy):
    fixture = trees(strategy=strategy)
    verified = fixture.verified()
    drafts = fixture.drafter.propose(verified, 2)
    for row in range(len(CONTEXTS)):
        assert paths(drafts, row) == best_paths(Chains(verified, row), 3, 10, steps=2)


def test_each_request_gets_its_tree_depth():
    fixture = trees()
    lens = torch.tensor([0, 1, 9], dtype=torch.int32)
    verified = fixture.verified()._replace(draft_lens=lens)
    drafts = fixture.drafter.propose(verified)
    assert paths(drafts, 0) == []
    for row, steps in ((1, 1), (2, K)):
        assert paths(drafts, row) == best_paths(Chains(verified, row), 3, 10, steps=steps)


def test_request_without_room_gets_root_children_and_overflows():
    verified = trees().verified()
    start = CONTEXTS[1] + int(verified.accepted[1]) + 1
    limit = max(start + 2, CONTEXTS[1] + K + 1)
    fixture = trees(limits=(MAX_SEQ_LEN, limit, MAX_SEQ_LEN))
    drafts = fixture.drafter.propose(verified)
    assert paths(drafts, 1) == best_paths(Chains(verified, 1), 3, 10, steps=1)
    assert paths(drafts, 2) == best_paths(Chains(verified, 2), 3, 10)
    assert fixture.tables.overflow[:3].tolist() == [0, 1, 0]


class Modules(ModuleDraft, TwoLayerDraft):
    """A draft with a module for each token."""

    @property
    def prediction_modules(self):
        return (self,) * K


def test_tree_of_module_draft_is_rejected():
    with pytest.raises(BatchError, match="runs step by step or proposes a block; this one has a module for each token"):
        trees(make_model=Modules)


WIDE = DraftTree.from_paths([*((i,) for i in range(22)), *((i, 0) for i in range(22)), (0, 0, 0)])


def test_tree_needs_backend_that_captures_several_tokens():
    with pytest.raises(StrategyError, match="captures steps of one token per request; a tree has more"):
        DrafterFixture([get("triton_paged"), DecodeOnly()], tree=DYNAMIC, strategy=Strategy.FULL_LOOP)


FRONTIERS = f"at most 64 tokens together, got 22 at each of {K - 1} steps"
REFUSED = {
    "deeper than the steps": (DraftTree.chain(K + 1), f"at most {K} deep, the draft's steps"),
    "no tree": ((0, 1), r"tree must be of type DraftTree or of type DynamicTreeConfig or None, got \(0, 1\)"),
    "more choices than tokens": (
        DynamicTreeConfig(width=25, num_tokens=10),
        "at most 24 choices after a token, all that the draft has, got 25",
    ),
    "frontiers that no mask holds": (WIDE, FRONTIERS),
    "frontiers that no mask holds, of no shape": (DynamicTreeConfig(width=22, num_tokens=9), FRONTIERS),
    "more places than a table has": (
        DynamicTreeConfig(width=19, num_tokens=10),
        "needs 59 places per request, the tables have 48",
    ),
}


@pytest.mark.parametrize(("tree", "message"), REFUSED.values(), ids=REFUSED)
def test_invalid_tree_is_rejected(tree, message):
    with pytest.raises(BatchError, match=message):
        trees(tree)
