"""Whole texts drafted in trees of blocks: what plain decoding says, whoever runs beside, to the last token."""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch

from attn_backends import NoBackend, get
from builders import BatchError
from spec_decode.drafter import Strategy
from spec_decode.engine import Engine
from spec_decode.models import SHIPPED_PAIR, load_pair
from spec_decode.models.load import load_draft
from spec_decode.paged import GraphMode
from spec_decode.trees import DraftTree, DynamicTreeConfig
from tests.factories import engine_config
from tests.spec_decode.engine.test_engine_blocks import CHECKPOINTS, TARGET
from tests.spec_decode.engine.test_engine_trees import NoTrees, requests, texts
from tests.spec_decode.models.generated import make_eagle3
from tests.spec_decode.trees.tree_helpers import TREES

SHIPPED_TARGET, SHIPPED = load_pair(SHIPPED_PAIR, draft="block_draft")
DYNAMIC, STATIC = DynamicTreeConfig(width=4, num_tokens=12), TREES["wide and deep"]


def peagle(draft_vocab):
    return make_eagle3(
        mask=(),
        ptd_token_id=7,
        num_states=1,
        eagle_aux_hidden_state_layer_ids=[0],
        draft_vocab=draft_vocab,
        target_hidden=TARGET.hidden_size,
        hidden_size=TARGET.hidden_size,
        vocab_size=TARGET.vocab_size,
        max_position_embeddings=512,
    )


PUBLISHED = {"peagle": peagle(100), **CHECKPOINTS}


@pytest.fixture(scope="module", params=["shipped", *PUBLISHED])
def draft(request, tmp_path_factory):
    if request.param == "shipped":
        return SHIPPED
    return load_draft(
        PUBLISHED[request.param].write(tmp_path_factory.mktemp(request.param)), TARGET, dtype=torch.float32
    )


def target_of(draft):
    return SHIPPED_TARGET if draft is SHIPPED else TARGET


def make_engine(draft, tree, *, steps=3, backend="triton_paged", **options):
    options = {"max_num_seqs": 3, "max_model_len": 96, "page_size": 16, **options}
    config = engine_config(num_speculative_tokens=steps, tree=tree, **options)
    return Engine(target_of(draft), draft, get(backend), config, draft_backend=get("torch_reference"))


def kept(engine, asked):
    return [(each.token_ids, each.accepted) for each in engine.generate(asked)]


@cache
def plain(target):
    """What plain decoding says."""
    config = engine_config(max_num_seqs=3, max_model_len=96, page_size=16)
    return texts(Engine(target, None, get("triton_paged"), config), requests())


@pytest.fixture(scope="module", params=[DYNAMIC, STATIC], ids=["dynamic", "static"])
def tree(request):
    return request.param


@pytest.fixture(scope="module")
def in_one_graph(draft, tree):
    """What an engine says and keeps whose whole round is one graph."""
    engine = make_engine(draft, tree)
    assert engine.plan.strategy is Strategy.FULL_LOOP
    return kept(engine, requests())


def test_a_text_drafted_in_trees_of_blocks_is_what_plain_decoding_says(draft, in_one_graph):
    assert [text for text, _ in in_one_graph] == plain(target_of(draft))


def test_one_graph_of_a_whole_round_keeps_what_eager_keeps(draft, tree, in_one_graph):
    assert in_one_graph == kept(make_engine(draft, tree, graph_mode=GraphMode.NONE), requests())


@pytest.mark.parametrize("strategy", [Strategy.EAGER, Strategy.PER_STEP, Strategy.PIECEWISE])
def test_every_strategy_says_what_plain_decoding_says(strategy):
    modes = {"graph_mode": GraphMode.PIECEWISE} if strategy is Strategy.PIECEWISE else {"strategy": strategy}
    assert texts(make_engine(SHIPPED, DYNAMIC, **modes), requests()) == plain(SHIPPED_TARGET)


def test_a_tree_of_one_path_drafts_what_a_chain_drafts(draft):
    """Greedily: at a temperature a chain is verified by another rule. And eagerly: graphs keep what eager keeps."""
    asked, trees = requests(temperatures=(0.0,)), (None, DraftTree.chain(5), DynamicTreeConfig(width=1, num_tokens=5))
    chain, *paths = [kept(make_engine(draft, tree, steps=5, graph_mode=GraphMode.NONE), asked) for tree in trees]
    assert paths == [chain, chain]
    assert draft is not SHIPPED or sum(chain[0][1]) > 0


def test_more_paths_have_more_tokens_accepted():
    asked, trees = requests(40, (0.0,)), (None, DynamicTreeConfig(width=8, num_tokens=60))
    chain, tree = (make_engine(SHIPPED, tree, steps=7, graph_mode=GraphMode.NONE) for tree in trees)
    texts(chain, asked), texts(tree, asked)
    assert tree.stats.mean_accepted > chain.stats.mean_accepted


def test_a_text_is_its_own_whoever_joins_leaves_or_is_preempted_beside_it():
    crowd, alone = requests() * 2, plain(SHIPPED_TARGET)
    order = random.Random(0).sample(range(len(crowd)), len(crowd))
    engine = make_engine(SHIPPED, DYNAMIC, num_pages=8)
    found = texts(engine, [crowd[at] for at in order])
    assert found == [alone[at % len(alone)] for at in order]
    assert engine.stats.preemptions > 0 and engine.pool.num_free == 8


@pytest.mark.parametrize(("steps", "tree"), [(3, replace(DYNAMIC, num_tokens=63)), (15, DYNAMIC)])
def test_a_request_drafts_whole_trees_to_the_end_of_its_text(draft, steps, tree):
    """Of more tokens than a block has places, and of fewer."""
    tree = replace(tree, num_tokens=min(tree.num_tokens, 36))
    engine = make_engine(draft, tree, steps=steps, graph_mode=GraphMode.NONE)
    texts(engine, requests(temperatures=(0.0,)))
    assert not any(int(tables.overflow.sum()) for tables in engine._tables)


def test_a_draft_that_runs_over_no_tree_takes_a_backend_without_them():
    config = engine_config(num_speculative_tokens=3, tree=DYNAMIC, max_num_seqs=3, max_model_len=96, page_size=16)
    engine = Engine(SHIPPED_TARGET, SHIPPED, get("torch_reference"), config, draft_backend=NoTrees())
    assert texts(engine, requests()) == plain(SHIPPED_TARGET)
    with pytest.raises(NoBackend, match=r"no_trees refuses.*tree"):
        Engine(SHIPPED_TARGET, SHIPPED, NoTrees(), config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verification": "rejection"}, "trees are verified by sampling, got verification 'rejection'"),
        ({"steps": 2, "tree": STATIC}, "at most as deep as the draft has steps, 2, got a path of 3 tokens"),
        ({"tree": DynamicTreeConfig(width=2, num_tokens=15)}, "at most the 14 paths that 3 tokens of 2 choices make"),
    ],
)
def test_settings_that_fit_no_tree_of_a_block_are_refused(options, message):
    with pytest.raises(BatchError, match=message):
        make_engine(SHIPPED, **{"tree": DYNAMIC, **options})


def test_more_choices_than_the_draft_has_tokens_are_refused_before_anything_is_allocated(tmp_path, monkeypatch):
    draft = load_draft(peagle(9).write(tmp_path), TARGET, dtype=torch.float32)
    monkeypatch.setattr(Engine, "_make_groups", None)
    with pytest.raises(BatchError, match="as many choices after a token as the draft has, 9, got 10"):
        make_engine(draft, DynamicTreeConfig(width=10, num_tokens=12))
