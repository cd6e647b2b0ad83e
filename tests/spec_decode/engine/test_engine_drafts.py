"""Whole texts with every kind of draft equal plain decoding's, with and without graphs and other requests."""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch

from attn_backends import Feature, NoBackend, get
from attn_backends.torch_reference import TorchReference
from builders import BatchError
from spec_decode.drafter import Strategy
from spec_decode.engine import Engine
from spec_decode.graphs import GraphManager
from spec_decode.models.load import load_draft
from spec_decode.paged import GraphMode
from spec_decode.trees import DraftTree, DynamicTreeConfig
from tests.mutants.draft_shapes import MergesTrees
from tests.spec_decode.engine.engine_helpers import (
    BLOCKS,
    TARGET,
    kept,
    make_engine,
    overflows,
    pair,
    peagle,
    requests,
    texts,
)
from tests.spec_decode.trees.tree_helpers import TREES

DYNAMIC, STATIC = DynamicTreeConfig(width=4, num_tokens=12), TREES["wide and deep"]
MOST_KEPT = "synthetic:2.5"
"""Texts are then drafts for the most part, so that they change with any entry of any draft's cache."""


@cache
def longest(target):
    return texts(make_engine((target, None), steps=0, page_size=16), requests())


def plain(target, new=10):
    return [text[: request.sampling.max_tokens] for text, request in zip(longest(target), requests(new), strict=True)]


KINDS = {
    "a chain": ("draft", {}),
    "a chain of one": ("draft", {"steps": 1}),
    "block verification, logprobs and rows of padding": (
        "draft",
        {"verification": "block", "max_logprobs": 2, "max_num_seqs": 5},
    ),
    "most kept": ("draft", {"verification": MOST_KEPT}),
    "short of pages": ("draft", {"num_pages": 11, "page_size": 4}),
    "sure tokens only": ("draft", {"min_confidence": 0.3}),
    "a tree": ("draft", {"tree": DYNAMIC}),
    "a fixed tree": ("draft", {"tree": STATIC}),
    "a tree of fewer tokens than steps": ("draft", {"tree": DynamicTreeConfig(width=3, num_tokens=3), "steps": 5}),
    "modules": ("modules", {"steps": 2}),
    "modules, most kept": ("modules", {"steps": 4, "verification": MOST_KEPT}),
    "a block": ("block_draft", {}),
    **{f"a block of {name}": (name, {"steps": 7 if at % 2 else 1}) for at, name in enumerate(BLOCKS)},
    "sure tokens of a block only": ("dspark", {"steps": 4, "min_confidence": 0.3}),
    "a tree of a block": ("block_draft", {"tree": DYNAMIC}),
    "a tree of fewer tokens than places": ("block_draft", {"tree": DYNAMIC, "steps": 15}),
    **{f"a tree of {name}": (name, {"tree": DYNAMIC}) for name in BLOCKS if name != "pard"},
    "a fixed tree of dspark": ("dspark", {"tree": STATIC}),
}


MODES = [(1, {}), (0, {"graph_mode": GraphMode.NONE}), (2, {"one_graph": False})]
"""Graphs of a round, and what makes an engine have so many."""
OF_A_SHAPE = ("a chain", "short of pages", "a fixed tree", "modules", "a block of dspark")
"""One kind of each shape. It runs in two graphs too: a draft is captured alike whether the target's step follows in its
graph or in another. It has three rows, the others two, and one request more."""


OFTEN = (*OF_A_SHAPE, "a tree", "a block", "a tree of a block", "sure tokens only")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in OFTEN else pytest.mark.slow) for k in KINDS])
def test_every_graph_layout_gives_same_text(kind, monkeypatch):
    """One graph, two or none; greedy texts are also those of plain decoding."""
    name, options = KINDS[kind]
    (target, _), verification = pair(name), options.get("verification")
    # Rounds enough of either: one that keeps no draft adds one token.
    new = 5 if target is TARGET and verification != MOST_KEPT else 8
    backend = "triton_paged" if name == "draft" else "torch_reference"
    rows, modes = (3, MODES) if kind in OF_A_SHAPE else (2, MODES[:2])
    some = slice(2, 3 + rows)
    batch = requests(new, logprobs=2 if "max_logprobs" in options else None)[some]
    found = []
    for graphs, mode in modes:
        settings = {"backend": backend, "page_size": 16, "max_num_seqs": rows, "graph_mode": GraphMode.FULL, **options}
        engine = make_engine(pair(name), draft_backend=get("torch_reference"), **{**settings, **mode})
        assert engine.round_plan.one_graph is (graphs == 1)
        with monkeypatch.context() as patch:
            replays, drafted = watched(engine, patch)
            results = engine.generate(batch)
        found.append((results, replace(engine.stats, launch_seconds=0), drafted))
        assert len(replays) == graphs * engine.stats.rounds and not overflows(engine)
        assert engine.stats.preemptions > 0 or "num_pages" not in options
    assert all(each == found[0] for each in found)
    # Trees are verified by a rule that changes no text, others at a temperature change theirs.
    same = slice(None) if "tree" in options else slice(0, None, 2)
    if verification != MOST_KEPT:
        assert [result.token_ids for result in results][same] == plain(target, new)[some][same]


def watched(engine, patch):
    """From now on: a graph for each replay, and what is drafted in each round, for a target seldom keeps any of a
    random draft."""
    replays, drafted, replay, run = [], [], GraphManager.replay, engine.target.run

    def counted(self, key, needed):
        replays.append(key)
        replay(self, key, needed)

    def noted(*args):
        run(*args)
        drafted.append(engine.drafter.drafts.tokens[: len(engine._batched)].tolist())

    patch.setattr(GraphManager, "replay", counted)
    patch.setattr(engine.target, "run", noted)
    return replays, drafted


@pytest.mark.parametrize("strategy", Strategy)
def test_tree_merging_backend_matches_plain_decoding(strategy):
    """The prefix grows inside of what is captured."""
    mode = {"graph_mode": GraphMode.FULL, "strategy": strategy}
    if strategy is Strategy.PIECEWISE:
        mode = {"graph_mode": GraphMode.PIECEWISE}
    options = {"page_size": 16, "max_model_len": 96, "max_num_seqs": 2, "tree": DYNAMIC, **mode}
    engine = make_engine(pair("draft"), backend=MergesTrees(), **options)
    assert texts(engine, requests()[2:5]) == plain(pair("draft")[0])[2:5]


CROWDED = {
    "a chain": ("draft", {"verification": MOST_KEPT}),
    "a tree": ("draft", {"tree": DYNAMIC}),
    "modules": ("modules", {"verification": MOST_KEPT, "steps": 4, "num_pages": 15}),
    "a tree of a block": ("block_draft", {"tree": DYNAMIC}),
}


@pytest.mark.parametrize(("name", "options"), CROWDED.values(), ids=CROWDED)
def test_other_requests_change_no_text(name, options):
    order = random.Random(0).sample(range(8), 6)
    batch = [requests()[at] for at in order]
    crowded = make_engine(pair(name), **{"num_pages": 13, "max_prefill_tokens": 20, **options})
    if "tree" in options:  # which changes no text
        alone = [plain(pair(name)[0])[at] for at in order]
    else:
        alone = texts(make_engine(pair(name), **{**options, "max_num_seqs": 1, "num_pages": None}), batch)
    assert texts(crowded, batch) == alone
    assert crowded.stats.preemptions > 0 and crowded.pool.num_free == crowded.pool.num_pages


@pytest.mark.parametrize("name", ["draft", "block_draft"])
def test_tree_of_one_path_drafts_like_a_chain(name):
    """Greedily: at a temperature a chain is verified by another rule."""
    trees = (None, DraftTree.chain(4), DynamicTreeConfig(width=1, num_tokens=4))
    chain, *paths = [kept(make_engine(pair(name), tree=tree, steps=4), requests(8)[:4:2]) for tree in trees]
    assert paths == [chain, chain] and sum(chain[0][1]) > 0


@pytest.mark.parametrize(("name", "steps"), [("draft", 3), ("block_draft", 7)])
def test_wider_tree_accepts_more_tokens(name, steps):
    trees = (None, DynamicTreeConfig(width=8, num_tokens=40))
    chain, tree = (make_engine(pair(name), tree=tree, steps=steps) for tree in trees)
    batch = requests(12, (0.0,))[:3]
    assert texts(chain, batch) == texts(tree, batch)
    assert tree.stats.mean_accepted > chain.stats.mean_accepted


class NoTrees(TorchReference):
    """A backend without the feature."""

    name = "no_trees"
    capabilities = replace(TorchReference.capabilities, features=frozenset(Feature) - {Feature.TREE})


def test_backend_without_trees_serves_only_block_drafts():
    target, draft = pair("block_draft")
    engine = make_engine((target, draft), draft_backend=NoTrees(), tree=DYNAMIC)
    assert texts(engine, requests()[2:5]) == plain(target)[2:5]
    for refused, backends in ((draft, {"backend": NoTrees()}), (pair("draft")[1], {"draft_backend": NoTrees()})):
        with pytest.raises(NoBackend, match=r"no_trees rejects.*tree"):
            make_engine((target, refused), tree=DYNAMIC, **backends)


REFUSED = {
    "rejection": (
        "draft",
        {"verification": "rejection"},
        "a tree needs verification 'sampling', got 'rejection'. Pass 'sampling', or no tree",
    ),
    "deeper than the steps": (
        "draft",
        {"steps": 2, "tree": STATIC},
        "at most 2 deep, .*, got a path of 3 tokens",
    ),
    "a word": ("draft", {"tree": "4x12"}, "of type DraftTree or of type DynamicTreeConfig or None, got '4x12'"),
    "a tree's rule": ("draft", {"tree": None, "verification": "sampling"}, "of rejection, block, .* got 'sampling'"),
    "more than all paths": (
        "block_draft",
        {"tree": DynamicTreeConfig(width=2, num_tokens=15)},
        "more than the 14 paths of 3 tokens with 2 choices",
    ),
    "modules": ("modules", {}, "runs step by step or proposes a block; this one has a module for each token"),
    "more tokens than modules": (
        "modules",
        {"tree": None, "steps": 5},
        r"num_speculative_tokens must be at most 4, .*, got 5\. Lower it",
    ),
}


@pytest.mark.parametrize(("name", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_impossible_draft_options_are_rejected_before_allocation(name, options, message, monkeypatch):
    models = pair(name)
    monkeypatch.setattr(Engine, "_make_groups", None)
    with pytest.raises(BatchError, match=message):
        make_engine(models, **{"tree": DYNAMIC, **options})


def test_tree_wider_than_draft_vocabulary_is_rejected(tmp_path, monkeypatch):
    draft = load_draft(peagle(9).write(tmp_path), TARGET, dtype=torch.float32)
    monkeypatch.setattr(Engine, "_make_groups", None)
    with pytest.raises(BatchError, match="at most 9 choices after a token, all that the draft has, got 10"):
        make_engine((TARGET, draft), tree=DynamicTreeConfig(width=10, num_tokens=12))
