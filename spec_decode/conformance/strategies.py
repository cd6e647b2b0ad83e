"""Which strategies a drafter over one backend can run, why not the others, and their columns of the matrix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from spec_decode.drafter import Strategy, StrategyError
from spec_decode.drafter.plan import choose
from spec_decode.graphs import loop_unsupported_reason
from spec_decode.paged import GraphMode
from spec_decode.paged.kv_groups import KVGroup
from spec_decode.testing.subject import Subject


def unsupported_reason(subject: Subject, strategy: Strategy) -> str:
    """Why a drafter over this backend alone cannot run the strategy; empty when it can."""
    try:
        group = KVGroup(name="draft", backend=subject.backend, spec=subject.base_spec(), caches={})
        facts, no_loop = group.facts(subject.device), loop_unsupported_reason(subject.device)
        choose([facts], 4, GraphMode.FULL, forced=strategy, loop_unsupported_reason=no_loop)
    except StrategyError as error:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plug-in's builder may fail in any way; its checks report it too
        return f"cannot be asked: {type(error).__name__}: {error}"
    return ""


def supported_strategies(subject: Subject) -> list[Strategy]:
    """Those without a reason, in the enum's order."""
    return [strategy for strategy in Strategy if not unsupported_reason(subject, strategy)]


def strategy_column(strategy: Strategy) -> str:
    """Drafting in this strategy."""
    return f"strategy:{strategy.value}"


def every_strategy(subject: Subject, case: Any) -> Iterable[str]:
    """The strategies that the backend can run: for a check that compares them."""
    return map(strategy_column, supported_strategies(subject))


def one_strategy(subject: Subject, case: Any) -> Iterable[str]:
    """The strategy that the case is, else the one that a drafter chooses."""
    # The device loop is run only where it is asked for.
    able = [strategy for strategy in supported_strategies(subject) if strategy.implementation.automatic]
    return map(strategy_column, [case] if isinstance(case, Strategy) else able[:1])
