import pytest

from builders import AdvanceLevel, AdvanceSupport, GraphSupport, HostLengths
from spec_decode.drafter import Strategy, StrategyError
from spec_decode.drafter.plan import choose_strategy
from spec_decode.paged import GraphMode
from spec_decode.paged.metadata_plan import GroupFacts, plan_uniform_step

FULL, NONE = GraphMode.FULL, GraphMode.NONE


def group(name, level=AdvanceLevel.IN_GRAPH, support=GraphSupport.ALWAYS, **options):
    reason = f"{name} has its reason"
    return GroupFacts(
        name=name, backend=f"{name}_kernels", graph_support=support, advance=AdvanceSupport(level, reason), **options
    )


ADVANCING, OTHER = group("advancing"), group("other")
REBUILT = group("rebuilt", AdvanceLevel.REBUILD)
PLANNED = group("planned", AdvanceLevel.PREPLANNED)
NEVER = group("never", support=GraphSupport.NEVER)
DECODE_ONLY = group("decode_only", support=GraphSupport.SINGLE_TOKEN_DECODE)

CHOSEN = {
    "all in graph": ([ADVANCING, OTHER], FULL, Strategy.FULL_LOOP, []),
    "one rebuilt": ([ADVANCING, REBUILT, OTHER], FULL, Strategy.PER_STEP, [1]),
    "all rebuilt": ([REBUILT, REBUILT], FULL, Strategy.PER_STEP, [0, 1]),
    "one planned ahead": ([PLANNED, ADVANCING], FULL, Strategy.FULL_LOOP, []),
    "one planned ahead beside a rebuilt one": ([PLANNED, REBUILT, ADVANCING], FULL, Strategy.PER_STEP, [0, 1]),
    "captured for decode alone": ([DECODE_ONLY], FULL, Strategy.FULL_LOOP, []),
    "one that no graph holds": ([ADVANCING, NEVER], FULL, Strategy.PIECEWISE, []),
    "a rebuilt one beside one that no graph holds": ([REBUILT, NEVER], FULL, Strategy.PIECEWISE, [0]),
    "graphs turned off": ([ADVANCING, OTHER], NONE, Strategy.EAGER, [0, 1]),
}


@pytest.mark.parametrize(("groups", "mode", "strategy", "rebuilt"), CHOSEN.values(), ids=CHOSEN)
@pytest.mark.parametrize("tokens", [1, 4])
def test_cheapest_strategy_all_groups_support_is_chosen(groups, mode, strategy, rebuilt, tokens):
    plan = choose_strategy(groups, tokens, mode)
    assert (plan.strategy, list(plan.rebuild_groups)) == (strategy, rebuilt)
    assert [group.facts for group in plan.groups] == groups
    assert {other for other, reason in plan.not_chosen if reason} == set(Strategy) - {strategy} and plan.reason


NOT_CHOSEN = {
    "a rebuilt group": (
        [ADVANCING, REBUILT],
        FULL,
        Strategy.FULL_LOOP,
        "group rebuilt (rebuilt_kernels) is REBUILD: rebuilt has its reason",
    ),
    "a group that no graph holds": (
        [ADVANCING, NEVER],
        FULL,
        Strategy.PER_STEP,
        "group never (never_kernels) cannot be captured at all",
    ),
    "graphs turned off": ([ADVANCING], NONE, Strategy.PER_STEP, "graphs are turned off"),
    "only if it is asked for": ([ADVANCING], FULL, Strategy.DEVICE_LOOP, "runs only on request"),
}


@pytest.mark.parametrize(("groups", "mode", "strategy", "reason"), NOT_CHOSEN.values(), ids=NOT_CHOSEN)
def test_reason_against_strategy_comes_from_its_group(groups, mode, strategy, reason):
    assert dict(choose_strategy(groups, 4, mode).not_chosen)[strategy].startswith(reason)


@pytest.mark.parametrize(
    ("groups", "strategy"),
    [([ADVANCING], Strategy.FULL_LOOP), ([REBUILT], Strategy.PER_STEP), ([NEVER], Strategy.EAGER)],
)
def test_block_draft_excludes_strategies_of_later_steps(groups, strategy):
    plan = choose_strategy(groups, 4, FULL, at_once=True)
    reasons = dict(plan.not_chosen)
    assert plan.strategy is strategy and "in one step" in reasons[Strategy.DEVICE_LOOP] == reasons[Strategy.PIECEWISE]


@pytest.mark.parametrize("groups", [[ADVANCING], [REBUILT], [NEVER], [DECODE_ONLY]])
def test_block_tree_changes_nothing_in_plan(groups):
    assert choose_strategy(groups, 4, FULL, at_once=True, tree=True) == choose_strategy(groups, 4, FULL, at_once=True)


IMPOSSIBLE = {
    "piecewise with nothing to cut around": ([ADVANCING], Strategy.PIECEWISE, {}, "nothing to split the graph around"),
    "device loop with a group planned ahead": (
        [ADVANCING, PLANNED],
        Strategy.DEVICE_LOOP,
        {},
        "planned has its reason",
    ),
    "device loop with a rebuilt group": ([ADVANCING, REBUILT], Strategy.DEVICE_LOOP, {}, "rebuilt has its reason"),
    "device loop of a block": ([ADVANCING], Strategy.DEVICE_LOOP, {"at_once": True}, "has no later steps"),
    "device loop where no device captures one": (
        [ADVANCING],
        Strategy.DEVICE_LOOP,
        {"loop_unsupported_reason": "the driver is too old"},
        "the driver is too old",
    ),
    "full loop with a rebuilt group": ([ADVANCING, REBUILT], Strategy.FULL_LOOP, {}, "rebuilt has its reason"),
    "per step around a group that no graph holds": ([NEVER], Strategy.PER_STEP, {}, "group never"),
    **{
        f"{strategy.value} without graphs": ([NEVER], strategy, {"graph_mode": NONE}, "graphs are turned off")
        for strategy in Strategy
        if strategy is not Strategy.EAGER
    },
}


@pytest.mark.parametrize(("groups", "forced", "options", "reason"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_impossible_forced_strategy_raises_with_plan_reason(groups, forced, options, reason):
    options = {"graph_mode": FULL, **options}
    with pytest.raises(StrategyError, match=f"{forced.value} cannot run: .*{reason}"):
        choose_strategy(groups, 4, forced=forced, **options)
    plan = choose_strategy(groups, 4, **options)
    assert reason in dict(plan.not_chosen)[forced] and plan.strategy is not forced


@pytest.mark.parametrize("forced", [s for s in Strategy if s is not Strategy.PIECEWISE])
def test_possible_forced_strategy_is_used(forced):
    plan = choose_strategy([ADVANCING], 4, FULL, forced=forced)
    assert (plan.strategy, plan.reason) == (forced, "requested")
    others = {reason for strategy, reason in plan.not_chosen if strategy is not Strategy.PIECEWISE}
    assert others == {f"{forced.value} was requested"}
    plan = choose_strategy([ADVANCING, NEVER], 4, FULL, forced=Strategy.PIECEWISE)
    assert (plan.strategy, plan.reason) == (Strategy.PIECEWISE, "requested")


@pytest.mark.parametrize("mode", [mode for mode in GraphMode if mode is not NONE])
def test_graph_modes_leave_choice_to_groups(mode):
    for groups in ([ADVANCING], [ADVANCING, REBUILT], [NEVER]):
        assert (
            choose_strategy(groups, 4, mode).strategy is choose_strategy(groups, 4, FULL).strategy is not Strategy.EAGER
        )


def test_only_uncapturable_attention_runs_between_pieces():
    plan = choose_strategy([ADVANCING, NEVER, REBUILT], 4, FULL)
    assert (plan.uncaptured_groups, plan.rebuild_groups) == ((1,), (2,))
    words = "advanced in the graph, attention between the graphs' pieces (it cannot be captured); "
    assert f"group never (never_kernels): {words}" in plan.explain()[-2]


@pytest.mark.parametrize("tokens", [0, -1])
def test_a_drafter_of_no_tokens_is_refused(tokens):
    with pytest.raises(StrategyError, match=f"num_speculative_tokens is {tokens}. Pass 1 or more"):
        choose_strategy([ADVANCING], tokens, FULL)


WAITS = {
    "rebuilt with exact lengths": (AdvanceLevel.REBUILD, HostLengths.EXACT, False, FULL, True),
    "rebuilt with bounds": (AdvanceLevel.REBUILD, HostLengths.UPPER_BOUND, False, FULL, False),
    "rebuilt without lengths": (AdvanceLevel.REBUILD, HostLengths.NONE, False, FULL, False),
    "advanced, exact lengths never asked for": (AdvanceLevel.IN_GRAPH, HostLengths.EXACT, False, FULL, False),
    "planned ahead with exact lengths": (AdvanceLevel.PREPLANNED, HostLengths.EXACT, False, FULL, True),
    "planned ahead with bounds": (AdvanceLevel.PREPLANNED, HostLengths.UPPER_BOUND, False, FULL, False),
    "built once a round with exact lengths": (AdvanceLevel.IN_GRAPH, HostLengths.EXACT, True, FULL, True),
    "built once a round with bounds": (AdvanceLevel.IN_GRAPH, HostLengths.UPPER_BOUND, True, FULL, False),
    "eager with exact lengths": (AdvanceLevel.IN_GRAPH, HostLengths.EXACT, False, NONE, True),
}


@pytest.mark.parametrize(("level", "lengths", "per_round", "mode", "waits"), WAITS.values(), ids=WAITS)
def test_only_build_with_exact_lengths_waits(level, lengths, per_round, mode, waits):
    """And makes no other group wait. The explanation shows it, and a build once a round."""
    facts = group("it", level, host_lengths=lengths, build_per_round=per_round)
    plan = choose_strategy([ADVANCING, facts], 4, mode)
    assert [each.waits for each in plan.groups] == [False, waits]
    line = plan.explain()[-1]
    assert line.startswith("group it (it_kernels): ") and line.endswith("; it has its reason")
    assert ("waiting for the device (a build needs exact lengths)" in line) is waits
    assert ("built once per round (its builder requires it)" in line) is per_round


def test_explanation_names_choice_and_every_group():
    lines = choose_strategy([ADVANCING, REBUILT], 4, FULL).explain()
    assert lines[0].startswith("strategy per_step: ")
    refused = [strategy.value for strategy in Strategy if strategy is not Strategy.PER_STEP]
    assert [line.split(":")[0] for line in lines[1:-2]] == [f"not {name}" for name in refused]
    assert lines[-2:] == [
        "group advancing (advancing_kernels): advanced in the graph; advancing has its reason",
        "group rebuilt (rebuilt_kernels): rebuilt at every step; rebuilt has its reason",
    ]


def test_preplanned_group_allows_full_loop():
    plan = choose_strategy([ADVANCING, PLANNED], 4, FULL)
    assert plan.preplanned_groups == (1,)
    assert plan.explain()[-1] == (
        "group planned (planned_kernels): planned ahead for every step of a round; planned has its reason"
    )


def test_preplanning_happens_only_in_full_loop():
    assert choose_strategy([PLANNED], 4, FULL, forced=Strategy.PER_STEP).preplanned_groups == ()


UNIFORM = {
    "advances": (ADVANCING, 5, FULL, "rebuild_groups", ()),
    "must be rebuilt": (REBUILT, 5, FULL, "rebuild_groups", (0,)),
    "has no step after it to plan": (PLANNED, 5, FULL, "rebuild_groups", (0,)),
    "eager": (ADVANCING, 5, NONE, "rebuild_groups", (0,)),
    "captured for decode, one token": (DECODE_ONLY, 1, FULL, "uncaptured_groups", ()),
    "captured for decode, several tokens": (DECODE_ONLY, 5, FULL, "uncaptured_groups", (0,)),
    "that no graph holds": (NEVER, 1, FULL, "uncaptured_groups", (0,)),
    "eager, that no graph holds": (NEVER, 1, NONE, "uncaptured_groups", ()),
    "piecewise": (ADVANCING, 5, GraphMode.PIECEWISE, "uncaptured_groups", (0,)),
    "built per round": (group("it", build_per_round=True), 5, FULL, "built_groups", (0,)),
}


@pytest.mark.parametrize(("facts", "query_len", "mode", "part", "expected"), UNIFORM.values(), ids=UNIFORM)
def test_uniform_step_plan_follows_group_facts(facts, query_len, mode, part, expected):
    assert getattr(plan_uniform_step([facts], query_len, mode), part) == expected


def test_uniform_step_plan_explains_uncaptured_attention():
    (line,) = plan_uniform_step([DECODE_ONLY], 5, FULL).explain()
    reason = "a graph needs UNIFORM_BATCH, its builder supports SINGLE_TOKEN_DECODE"
    assert f"attention between the graphs' pieces ({reason})" in line
    assert "(graph mode piecewise)" in plan_uniform_step([ADVANCING], 5, GraphMode.PIECEWISE).explain()[0]


@pytest.mark.parametrize("forced", [None, Strategy.FULL_LOOP])
def test_plan_without_groups_is_rejected(forced):
    with pytest.raises(StrategyError, match=r"at least one KV group, got none\. Pass the facts"):
        choose_strategy([], 4, FULL, forced=forced)
