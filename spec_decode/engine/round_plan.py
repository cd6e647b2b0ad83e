"""Decide whether one graph holds a whole decode round, draft and target step, with a reason."""

from __future__ import annotations

from dataclasses import dataclass

from spec_decode.drafter import Drafter, StrategyError
from spec_decode.engine.target_runner import TargetRunner


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """How a decode round is launched. one_graph: as one replay; else the draft and the target step are separate."""

    one_graph: bool
    reason: str

    def __str__(self) -> str:
        how = "one graph for draft and target" if self.one_graph else "draft and target are launched separately"
        return f"round: {how}: {self.reason}"


def plan_round(drafter: Drafter, target: TargetRunner, one_graph: bool | None) -> RoundPlan:
    """Plan one graph if nothing in a round needs the host, or as requested; captures nothing.

    Raises StrategyError if one graph was requested but is not possible: an explicit choice never falls back.
    """
    reason = drafter.separate_graph_reason or target.separate_graph_reason or _sizes_reason(drafter, target)
    if one_graph and reason:
        raise StrategyError(
            f"draft and target cannot share one graph: {reason}. Leave one_graph out, or remove the cause."
        )
    if one_graph is False:
        return RoundPlan(False, "requested")
    return RoundPlan(reason is None, reason or "nothing in it needs the host")


def _sizes_reason(drafter: Drafter, target: TargetRunner) -> str | None:
    """Return why the graphs of drafter and target do not pair up; None if they do."""
    if drafter.graphs.memory_limit is not None:
        return "graph_memory_limit applies only to the draft's graphs"
    draft, other = drafter.graphs.sizes, target.graphs.sizes
    return (
        None if draft == other else f"the draft's graphs are for {list(draft)} requests, the target's for {list(other)}"
    )
