"""A decode round as one graph of draft and target: what it says and keeps, and where it cannot be, with the reason."""

import re
from dataclasses import replace

import pytest
import torch

from attn_backends import get
from builders import BatchError
from spec_decode.drafter import DrafterConfig, Strategy, StrategyError
from spec_decode.engine import Engine, EngineConfig, RoundPlan
from spec_decode.graphs import GraphManager
from spec_decode.llm.byte_tokenizer import encode
from spec_decode.models import SHIPPED_PAIR, load_pair
from spec_decode.models.load import load_draft
from spec_decode.paged import GraphMode
from spec_decode.trees import DynamicTreeConfig
from tests.factories import engine_config, make_request
from tests.spec_decode.drafter.third_party_backends import DecodeOnly, Planned, Rebuilt, Uncapturable
from tests.spec_decode.engine.test_engine_blocks import CHECKPOINTS
from tests.spec_decode.engine.test_engine_blocks import TARGET as BLOCKS
from tests.spec_decode.engine.test_engine_modules import CONFIG
from tests.spec_decode.engine.test_engine_modules import TARGET as MODULES
from tests.spec_decode.models.generated_mtp import v3_modules, write
from tests.spec_decode.trees.tree_helpers import TREES

PROMPTS = ["The for statement", "def read(path):", "x", "An assignment to a list"]
CHAIN = load_pair(SHIPPED_PAIR)
DYNAMIC, STATIC = DynamicTreeConfig(width=3, num_tokens=8), TREES["wide and deep"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folders = {name: kind.write(tmp_path_factory.mktemp(name)) for name, kind in CHECKPOINTS.items()}
    found = {name: (BLOCKS, load_draft(folder, BLOCKS, dtype=torch.float32)) for name, folder in folders.items()}
    modules = write(tmp_path_factory.mktemp("modules"), CONFIG, v3_modules(CONFIG, shared=True))
    found["modules"] = MODULES, load_draft(modules, MODULES, dtype=torch.float32)
    return {**found, "chain": CHAIN, "shipped block": load_pair(SHIPPED_PAIR, draft="block_draft")}


def make_engine(pair=CHAIN, *, steps=3, backend="triton_paged", draft_backend=None, **options):
    options = {"max_num_seqs": 3, "max_model_len": 64, "page_size": 16, **options}
    config = engine_config(num_speculative_tokens=steps, **options)
    target = get(backend) if isinstance(backend, str) else backend
    return Engine(*pair, target, config, draft_backend=draft_backend or get("torch_reference"))


def requests(new=10, **options):
    """Of each prompt a greedy one and a hot one, of several lengths and more than run at once."""
    return [
        make_request(prompt=encode(prompt), max_tokens=new - at, temperature=temperature, seed=3 + at, **options)
        for at, prompt in enumerate(PROMPTS)
        for temperature in (0.0, 0.8)
    ]


def counted(monkeypatch):
    """The kinds of the graphs that are replayed from now on."""
    replayed, replay = [], GraphManager.replay

    def spy(self, key, needed):
        replayed.append(key.kind)
        replay(self, key, needed)

    monkeypatch.setattr(GraphManager, "replay", spy)
    return replayed


def drafts_of(engine, monkeypatch):
    """What is drafted in each round from now on: of random drafts too, of which a target seldom keeps any."""
    drafted, run = [], engine.target.run

    def spy(*args):
        run(*args)
        drafted.append(engine.drafter.drafts.tokens.tolist())

    monkeypatch.setattr(engine.target, "run", spy)
    return drafted


KINDS = {
    "a chain": ("chain", {}),
    "a chain of one": ("chain", {"steps": 1}),
    "block verification": ("chain", {"verification": "block"}),
    "most kept": ("chain", {"verification": "synthetic:2.5"}),
    "short of pages": ("chain", {"num_pages": 14, "page_size": 4}),
    "rows of padding": ("chain", {"max_num_seqs": 5}),
    "sure tokens only": ("chain", {"min_confidence": 0.3}),
    "logprobs": ("chain", {"max_logprobs": 2}),
    "a tree": ("chain", {"tree": DYNAMIC}),
    "a fixed tree": ("chain", {"tree": STATIC}),
    "modules": ("modules", {}),
    **{name: (name, {}) for name in ("shipped block", *CHECKPOINTS)},
    "a tree of a block": ("shipped block", {"tree": DYNAMIC}),
    "a tree in turn": ("dspark", {"tree": DYNAMIC}),
}


@pytest.mark.parametrize(("name", "options"), KINDS.values(), ids=KINDS)
def test_a_round_of_one_graph_says_and_keeps_what_two_do(pairs, name, options, monkeypatch):
    backend = "triton_paged" if name == "chain" else "torch_reference"
    asked = requests(logprobs=2 if "max_logprobs" in options else None)
    replayed, found = counted(monkeypatch), []
    for one_graph, graphs in ((None, 1), (False, 2)):
        engine = make_engine(pairs[name], backend=backend, one_graph=one_graph, **options)
        assert engine.round_plan.one_graph is (graphs == 1)
        drafted = drafts_of(engine, monkeypatch)
        results = engine.generate(asked)
        found.append((results, replace(engine.stats, launch_seconds=0), drafted))
        assert len(replayed) == graphs * engine.stats.rounds
        assert engine.stats.preemptions > 0 or "num_pages" not in options
        replayed.clear()
    assert found[0] == found[1]


def test_one_graph_is_captured_instead_of_two():
    engine = make_engine()
    assert str(engine.round_plan) == "round: one graph of draft and target: nothing in it needs the host"
    engine.capture()
    assert {report.key.kind for report in engine.target.graphs.reports} == {"target"}
    assert engine.drafter.graphs.reports == []


@pytest.fixture(scope="module")
def whole():
    """What an engine says and keeps whose rounds are one graph."""
    return make_engine().generate(requests())


APART = {
    "asked for": ({"one_graph": False}, "asked for"),
    "no graphs": ({"graph_mode": GraphMode.NONE}, "the draft's strategy is eager, which uses no graphs"),
    "an eager draft": ({"strategy": Strategy.EAGER}, "the draft's strategy is eager, which uses no graphs"),
    "step by step": ({"strategy": Strategy.PER_STEP}, "the draft's strategy is per_step: it replays a graph for each"),
    "a loop": ({"strategy": Strategy.DEVICE_LOOP}, "the draft's strategy is device_loop: its loop ends its graph"),
    "step 0 outside": ({"extend_in_graph": False}, "the draft's step 0 runs without a graph: extend_in_graph is off"),
    "short queries": ({"draft_backend": DecodeOnly()}, r"group draft \(.*\) cannot capture step 0, of several tokens"),
    "planned ahead": (
        {"draft_backend": Planned()},
        r"the host builds the metadata of group draft \(.*\) in every round",
    ),
    "rebuilt": ({"draft_backend": Rebuilt()}, r"the host builds the metadata of group draft \(.*\) in every round"),
    "the target rebuilt": (
        {"backend": Rebuilt()},
        r"the host builds the metadata of group target \(.*\) in every round",
    ),
    "the target in pieces": (
        {"backend": Uncapturable()},
        r"the attention of group target \(.*\) runs between the graph",
    ),
    "other sizes": ({"capture_sizes": [3]}, r"the draft's graphs are of \[3\] requests, the target's of \[1, 2, 3\]"),
    "a memory limit": ({"graph_memory_limit": 1 << 30}, "graph_memory_limit is of the draft's graphs alone"),
}


@pytest.mark.parametrize(("options", "reason"), APART.values(), ids=APART)
def test_where_one_graph_cannot_be_the_plan_says_why_and_the_texts_stay(whole, options, reason):
    engine = make_engine(**options)
    assert not engine.round_plan.one_graph and re.match(reason, engine.round_plan.reason), engine.round_plan
    assert engine.generate(requests()) == whole


@pytest.mark.parametrize(("options", "reason"), list(APART.values())[1:], ids=list(APART)[1:])
def test_one_graph_that_cannot_be_is_refused(options, reason):
    with pytest.raises(StrategyError, match=f"one graph of draft and target cannot be: {reason}.*Leave one_graph out"):
        make_engine(one_graph=True, **options)


def test_a_target_without_graphs_runs_after_a_captured_draft():
    config = EngineConfig(drafter=DrafterConfig(num_speculative_tokens=3), graph_mode=GraphMode.NONE)
    plan = Engine(*CHAIN, get("torch_reference"), config).round_plan
    assert plan == RoundPlan(False, "the target runs without graphs: its graph mode is none")


def test_plain_decoding_has_no_plan_of_a_round_and_none_is_taken():
    assert make_engine((CHAIN[0], None), steps=0).round_plan is None
    with pytest.raises(BatchError, match=r"one_graph is False, and there is no draft.*Leave it out"):
        make_engine((CHAIN[0], None), steps=0, one_graph=False)
