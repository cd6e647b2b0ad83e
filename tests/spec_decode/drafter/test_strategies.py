from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from attn_backends import get
from builders import CaptureConstants
from spec_decode.drafter import Strategy, StrategyError
from spec_decode.drafter.strategies.base import LoopStrategy
from spec_decode.graphs import Capturable, GraphManager
from spec_decode.graphs.dispatch_mode import PlainDispatchMode
from spec_decode.paged import GraphMode
from tests.foreseen import ForeseenBuilder
from tests.spec_decode.drafter.drafter_fixture import (
    CONTEXTS,
    GREEDY_AND_HOT,
    MAX_SEQ_LEN,
    DrafterFixture,
    K,
    advancing,
    assert_same,
    decode_only,
    mixed,
    piecewise,
    preplanned,
)
from tests.spec_decode.drafter.third_party_backends import (
    Advancing,
    AdvancingBuilder,
    Planned,
    Rebuilt,
    RebuiltBuilder,
    Uncapturable,
    UncapturableRebuilt,
)

pytestmark = pytest.mark.outside_inference_mode


def of(*backends):
    return lambda **options: DrafterFixture([make() for make in backends], **options)


KINDS = {
    "advancing": (advancing, Strategy.FULL_LOOP, {"step_0", "round"}),
    "rebuilt": (mixed, Strategy.PER_STEP, {"step_0", "step"}),
    "planned ahead": (preplanned, Strategy.FULL_LOOP, {"step_0", "loop"}),
    "captured for decode alone": (decode_only, Strategy.FULL_LOOP, {"loop"}),
    "that no graph holds": (of(Advancing, Uncapturable), Strategy.PIECEWISE, {"step"}),
    "that no graph holds, beside a rebuilt one": (of(Rebuilt, Uncapturable), Strategy.PIECEWISE, {"step"}),
    "that no graph holds, rebuilt": (of(Advancing, UncapturableRebuilt), Strategy.PIECEWISE, {"step"}),
}


@pytest.mark.parametrize(("make", "strategy", "kinds"), KINDS.values(), ids=KINDS)
def test_every_group_kind_drafts_like_eager(make, strategy, kinds):
    fixture = make()
    expected = make(strategy=Strategy.EAGER).rounds(temperature=GREEDY_AND_HOT)
    assert_same(fixture.rounds(temperature=GREEDY_AND_HOT), expected)
    assert fixture.drafter.plan.strategy is strategy
    assert {report.key.kind for report in fixture.drafter.graphs.reports} == kinds


@pytest.mark.parametrize(
    ("mode", "steps"), [(GraphMode.NONE, 3), (GraphMode.FULL, 2), (GraphMode.FULL, 5), (GraphMode.PIECEWISE, 3)]
)
def test_every_graph_mode_drafts_like_eager(mode, steps):
    expected = advancing(steps=steps, strategy=Strategy.EAGER).rounds(2)
    found = advancing(steps=steps, graph_mode=mode)
    assert_same(found.rounds(2), expected)
    kinds = {report.key.kind for report in found.drafter.graphs.reports}
    assert kinds == (set() if mode is GraphMode.NONE else {"step_0", "round"})
    assert (found.drafter.plan.strategy is Strategy.EAGER) == (mode is GraphMode.NONE)


def test_round_builds_only_rebuild_group_each_step():
    fixture = mixed()
    fixture.drafter.capture()
    AdvancingBuilder.builds.clear()
    RebuiltBuilder.builds.clear()
    fixture.drafter.propose(fixture.verified())
    assert AdvancingBuilder.builds == []
    assert RebuiltBuilder.builds == [K + 1] + [1] * (K - 1)


def test_forced_full_loop_with_rebuild_group_raises():
    with pytest.raises(StrategyError, match="its plan is made on the host"):
        mixed(strategy=Strategy.FULL_LOOP)


def test_round_plans_later_steps_before_the_loop():
    fixture = preplanned()
    fixture.drafter.capture()
    AdvancingBuilder.builds.clear()
    ForeseenBuilder.builds.clear()
    verified = fixture.verified()
    fixture.drafter.propose(verified)
    start = [c + int(a) + 1 for c, a in zip(CONTEXTS, verified.accepted, strict=True)]
    assert AdvancingBuilder.builds == []
    assert ForeseenBuilder.builds == [(*(n + step for n in start), 0) for step in range(1, K)]


def test_plan_stops_at_request_limit():
    start = CONTEXTS[1] + int(preplanned().verified().accepted[1]) + 1
    fixture = preplanned(limits=(MAX_SEQ_LEN, start + 2, MAX_SEQ_LEN))
    fixture.drafter.capture()
    ForeseenBuilder.builds.clear()
    fixture.drafter.propose(fixture.verified())
    assert [lens[1] for lens in ForeseenBuilder.builds] == [start + 1, start + 2, start + 2]


def test_preplanned_groups_draft_like_eager_up_to_limit():
    limits = (MAX_SEQ_LEN, 14, MAX_SEQ_LEN)
    expected = preplanned(strategy=Strategy.EAGER, limits=limits).rounds(1, temperature=GREEDY_AND_HOT)
    found = preplanned(limits=limits).rounds(1, temperature=GREEDY_AND_HOT)
    for (tokens, logits), (wanted, wanted_logits) in zip(found, expected, strict=True):
        assert tokens.tolist() == wanted.tolist()
        assert torch.equal(logits[tokens >= 0], wanted_logits[tokens >= 0])


@pytest.mark.parametrize(
    ("make", "num_tokens", "kinds"),
    [
        (advancing, None, ["round"]), (advancing, 2, ["round"]), (advancing, 1, ["step_0"]),
        (preplanned, None, ["step_0", "loop"]), (decode_only, None, ["loop"]),
    ],
)  # fmt: skip
def test_one_graph_runs_round_if_host_builds_nothing(monkeypatch, make, num_tokens, kinds):
    fixture, replayed, replay = make(strategy=Strategy.FULL_LOOP), [], GraphManager.replay
    fixture.drafter.capture()
    monkeypatch.setattr(
        GraphManager, "replay", lambda self, key, needed: (replayed.append(key.kind), replay(self, key, needed))
    )
    fixture.drafter.propose(fixture.verified(), num_tokens)
    assert replayed == kinds


@pytest.mark.parametrize(("of_step_0", "of_later"), [(20, 10), (10, 20)])
def test_joined_graph_takes_widest_and_shortest_bounds(of_step_0, of_later):
    class Loop(LoopStrategy):
        unsupported_reason = None

        def _after(self, size, before):
            return Capturable(before, CaptureConstants(max_reqs=size, max_query_len=1, max_seq_len=of_later))

    step_0 = Capturable(print, CaptureConstants(max_reqs=4, max_query_len=5, max_seq_len=of_step_0))
    buffers = SimpleNamespace(built_groups=())
    loop = Loop(SimpleNamespace(step_0=buffers, decode=buffers), graphs=None)
    joined = loop.joined(lambda size: step_0)(4)
    assert joined.run is print
    assert joined.constants == CaptureConstants(max_reqs=4, max_query_len=5, max_seq_len=10)


@pytest.mark.parametrize("other", ["torch_reference", "rebuilt"])
def test_build_per_round_group_drafts_like_eager(other):
    def rounds(strategy):
        fixture = DrafterFixture([Planned(), Rebuilt() if other == "rebuilt" else get(other)], strategy=strategy)
        first = fixture.drafter.propose(fixture.verified()).tokens.tolist()
        fixture.load([2, 1, 0])
        verified = fixture.verified(round_=1, rows=[2, 1, 0], contexts=[5, 12, 20])
        return first, fixture.drafter.propose(verified).tokens.tolist()

    assert rounds(None) == rounds(Strategy.EAGER)


class CountedOps(PlainDispatchMode):
    """How often each operation runs, by its name."""

    def __init__(self):
        super().__init__()
        self.runs = Counter()

    def dispatch(self, func, args, kwargs):
        self.runs[func._schema.name] += 1
        return func(*args, **kwargs)


@pytest.mark.parametrize("strategy", [None, Strategy.EAGER])
@pytest.mark.parametrize("make", [advancing, mixed, preplanned, decode_only, piecewise])
def test_round_sets_step_0_state_once(make, strategy):
    fixture = make(strategy=strategy)
    fixture.drafter.capture()
    verified = fixture.verified()
    with CountedOps() as counted:
        fixture.drafter.propose(verified)
    assert counted.runs["builders::set_extend_state"] == 1
