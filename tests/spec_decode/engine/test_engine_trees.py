"""Whole texts drafted in trees: what plain decoding says, whatever the tree, the strategy and who runs beside."""

import random
from dataclasses import replace

import pytest

from attn_backends import Feature, NoBackend, get
from attn_backends.torch_reference import TorchReference
from builders import BatchError
from spec_decode.drafter import Strategy
from spec_decode.engine import Engine
from spec_decode.llm.byte_tokenizer import encode
from spec_decode.models import SHIPPED_PAIR, load_pair
from spec_decode.paged import GraphMode
from spec_decode.trees import DraftTree, DynamicTreeConfig
from tests.factories import engine_config, make_request
from tests.mutants.draft_shapes import MergesTrees
from tests.spec_decode.trees.tree_helpers import TREES

PROMPTS = ["The for statement", "def read(path):", "x", "An assignment to a list"]
TARGET, DRAFT = load_pair(SHIPPED_PAIR)
DYNAMIC, STATIC = DynamicTreeConfig(width=4, num_tokens=12), TREES["wide and deep"]
BOTH = pytest.mark.parametrize("tree", [DYNAMIC, STATIC], ids=["dynamic", "static"])


def make_engine(tree, *, steps=3, backend="triton_paged", **options):
    options = {"max_num_seqs": 3, "max_model_len": 96, "page_size": 16, **options}
    config = engine_config(num_speculative_tokens=steps, tree=tree, **options)
    return Engine(TARGET, DRAFT if steps else None, get(backend), config)


def requests(new=12, temperatures=(0.0, 0.8)):
    """Of each prompt a greedy one and a hot one, more than run at once."""
    return [
        make_request(prompt=encode(prompt), max_tokens=new, temperature=temperature, seed=3 + at)
        for at, prompt in enumerate(PROMPTS)
        for temperature in temperatures
    ]


def texts(engine, asked):
    return [generation.token_ids for generation in engine.generate(asked)]


class NoTrees(TorchReference):
    """A backend without the feature."""

    name = "no_trees"
    capabilities = replace(TorchReference.capabilities, features=frozenset(Feature) - {Feature.TREE})


@pytest.fixture(scope="module")
def plain():
    """What plain decoding says."""
    return texts(make_engine(None, steps=0), requests())


@BOTH
@pytest.mark.parametrize("backend", ["torch_reference", "triton_paged"])
def test_a_text_drafted_in_trees_is_what_plain_decoding_says(plain, tree, backend):
    """And trees are drafted to its end."""
    engine = make_engine(tree, backend=backend)
    assert texts(engine, requests()) == plain
    assert not any(int(tables.overflow.sum()) for tables in engine._tables)


@pytest.mark.parametrize("strategy", [Strategy.FULL_LOOP, Strategy.DEVICE_LOOP, Strategy.PER_STEP, Strategy.EAGER])
def test_a_backend_that_merges_a_tree_with_its_prefix_says_what_plain_decoding_says(plain, strategy):
    """The prefix grows inside of what is captured."""
    config = engine_config(
        num_speculative_tokens=3, tree=DYNAMIC, max_num_seqs=3, max_model_len=96, page_size=16, strategy=strategy
    )
    assert texts(Engine(TARGET, DRAFT, MergesTrees(), config), requests()) == plain


@pytest.mark.parametrize("strategy", Strategy)
def test_every_strategy_says_what_plain_decoding_says(plain, strategy):
    if strategy is Strategy.PIECEWISE:
        strategy, options = None, {"graph_mode": GraphMode.PIECEWISE}
    else:
        options = {"strategy": strategy}
    assert texts(make_engine(DYNAMIC, **options), requests()) == plain


def test_a_tree_of_one_path_drafts_what_a_chain_drafts():
    """Greedily: at a temperature a chain is verified by another rule."""
    asked, trees = requests(temperatures=(0.0,)), (None, DraftTree.chain(5), DynamicTreeConfig(width=1, num_tokens=5))
    engines = [make_engine(tree, steps=5, graph_mode=GraphMode.NONE) for tree in trees]
    chain, *paths = [[each.accepted for each in engine.generate(asked)] for engine in engines]
    assert paths == [chain, chain]


def test_more_paths_have_more_tokens_accepted():
    asked = requests(40, (0.0,))
    trees = (None, DynamicTreeConfig(width=8, num_tokens=40))
    chain, tree = (make_engine(tree, steps=3, graph_mode=GraphMode.NONE) for tree in trees)
    texts(chain, asked), texts(tree, asked)
    assert tree.stats.rounds < chain.stats.rounds


def test_a_text_is_its_own_whoever_joins_leaves_or_is_preempted_beside_it(plain):
    crowd = requests() * 2
    order = random.Random(0).sample(range(len(crowd)), len(crowd))
    engine = make_engine(DYNAMIC, num_pages=8)
    found = texts(engine, [crowd[at] for at in order])
    assert found == [plain[at % len(plain)] for at in order]
    assert engine.stats.preemptions > 0 and engine.pool.num_free == 8


def test_a_tree_may_have_fewer_tokens_than_the_draft_has_steps(plain):
    assert texts(make_engine(DynamicTreeConfig(width=3, num_tokens=3), steps=5), requests()) == plain


def test_a_backend_without_trees_is_refused_by_name():
    with pytest.raises(NoBackend, match=r"no_trees refuses.*tree"):
        Engine(TARGET, DRAFT, NoTrees(), engine_config(num_speculative_tokens=3, tree=DYNAMIC))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verification": "rejection"}, "trees are verified by sampling, got verification 'rejection'"),
        ({"steps": 1, "tree": STATIC}, "at most"),
        ({"tree": "4x12"}, "tree must be of type DraftTree or of type DynamicTreeConfig or None, got '4x12'"),
        ({"tree": None, "verification": "sampling"}, "one of rejection, block, .* got 'sampling'"),
    ],
)
def test_settings_that_fit_no_tree_are_refused(options, message):
    with pytest.raises(BatchError, match=message):
        make_engine(**{"tree": DYNAMIC, **options})
