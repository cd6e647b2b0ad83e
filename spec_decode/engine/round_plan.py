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
        how = "one graph of draft and target" if self.one_graph else "draft and target are launched one by one"
        return f"round: {how}: {self.reason}"


def plan_round(drafter: Drafter, target: TargetRunner, asked: bool | None) -> RoundPlan:
    """Plan one graph if nothing in a round needs the host, or as requested; captures nothing.

    Raises StrategyError if one graph was requested but is not possible: an explicit choice never falls back.
    """
    reason = drafter.apart_reason or target.apart_reason or _sizes_reason(drafter, target)
    if asked and reason:
        raise StrategyError(
            f"one graph of draft and target cannot be: {reason}. Leave one_graph out, or change what stands against it."
        )
    if asked is False:
        return RoundPlan(False, "asked for")
    return RoundPlan(reason is None, reason or "nothing in it needs the host")


def _sizes_reason(drafter: Drafter, target: TargetRunner) -> str | None:
    """Return why the graphs of drafter and target do not pair up; None if they do."""
    if drafter.graphs.memory_limit is not None:
        return "graph_memory_limit is of the draft's graphs alone"
    own, theirs = drafter.graphs.sizes, target.graphs.sizes
    return None if own == theirs else f"the draft's graphs are of {list(own)} requests, the target's of {list(theirs)}"
