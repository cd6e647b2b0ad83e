"""A decode round as one graph of draft and target: when it is possible, and the reason when it is not."""

import re

import pytest

from attn_backends import get
from builders import BatchError
from spec_decode.drafter import DrafterConfig, Strategy, StrategyError
from spec_decode.engine import Engine, EngineConfig, RoundPlan
from spec_decode.paged import GraphMode
from tests.spec_decode.drafter.third_party_backends import DecodeOnly, Planned, Rebuilt, Uncapturable
from tests.spec_decode.engine.engine_helpers import make_engine, pair, requests

CHAIN, ASKED = pair("draft"), requests(5)[2:5]


def make_round(pair=CHAIN, **options):
    """An engine of the shipped pair, in graphs."""
    options = {"backend": "triton_paged", "draft_backend": get("torch_reference"), "max_num_seqs": 2, **options}
    return make_engine(pair, **{"graph_mode": GraphMode.FULL, **options})


def test_one_graph_is_captured_instead_of_two():
    engine = make_round()
    assert str(engine.round_plan) == "round: one graph for draft and target: nothing in it needs the host"
    engine.capture()
    assert {report.key.kind for report in engine.target.graphs.reports} == {"target"}
    assert engine.drafter.graphs.reports == []


@pytest.fixture(scope="module")
def whole():
    """What an engine says and keeps whose rounds are one graph."""
    return make_round().generate(ASKED)


APART = {
    "requested": ({"one_graph": False}, "requested"),
    "no graphs": ({"graph_mode": GraphMode.NONE}, "the draft's strategy is eager, which uses no graphs"),
    "an eager draft": ({"strategy": Strategy.EAGER}, "the draft's strategy is eager, which uses no graphs"),
    "step by step": ({"strategy": Strategy.PER_STEP}, "the draft's strategy is per_step: it replays a graph for each"),
    "a loop": ({"strategy": Strategy.DEVICE_LOOP}, "the draft's strategy is device_loop: its graph ends with the loop"),
    "step 0 outside": ({"step_0_in_graph": False}, "the draft's step 0 runs without a graph: step_0_in_graph is off"),
    "short queries": (
        {"draft_backend": DecodeOnly()},
        r"group draft \(.*\) cannot capture step 0, with several tokens",
    ),
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
    "other sizes": ({"capture_sizes": [2]}, r"the draft's graphs are for \[2\] requests, the target's for \[1, 2\]"),
    "a memory limit": ({"graph_memory_limit": 1 << 30}, "graph_memory_limit applies only to the draft's graphs"),
}


@pytest.mark.parametrize(("options", "reason"), APART.values(), ids=APART)
def test_plan_explains_separate_graphs_and_texts_match(whole, options, reason):
    engine = make_round(**options)
    assert not engine.round_plan.one_graph and re.match(reason, engine.round_plan.reason), engine.round_plan
    assert engine.generate(ASKED) == whole


@pytest.mark.parametrize(("options", "reason"), list(APART.values())[1:], ids=list(APART)[1:])
def test_impossible_one_graph_is_rejected(options, reason):
    with pytest.raises(StrategyError, match=f"draft and target cannot share one graph: {reason}.*Leave one_graph out"):
        make_round(one_graph=True, **options)


def test_piecewise_is_rejected_if_all_attention_captures():
    with pytest.raises(StrategyError, match="strategy piecewise cannot run: every group's attention can be captured"):
        make_round(graph_mode=GraphMode.PIECEWISE, strategy=Strategy.PIECEWISE)


def test_target_without_graphs_follows_captured_draft():
    config = EngineConfig(drafter=DrafterConfig(num_speculative_tokens=3), graph_mode=GraphMode.NONE)
    plan = Engine(*CHAIN, get("torch_reference"), config).round_plan
    assert plan == RoundPlan(False, "the target runs without graphs: its graph mode is none")


def test_plain_decoding_has_no_round_plan():
    assert make_round((CHAIN[0], None), steps=0).round_plan is None
    with pytest.raises(BatchError, match=r"one_graph is False, but there is no draft.*Leave it out"):
        make_round((CHAIN[0], None), steps=0, one_graph=False)
