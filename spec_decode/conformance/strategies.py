"""Which strategies a drafter over one backend can run, and why it cannot run the others."""

from __future__ import annotations

from spec_decode.drafter import GraphMode, Strategy, StrategyError
from spec_decode.drafter.kv_groups import KVGroup
from spec_decode.drafter.plan import choose
from spec_decode.graphs import loop_unsupported_reason
from spec_decode.testing.subject import Subject


def unsupported_reason(subject: Subject, strategy: Strategy) -> str:
    """Why a drafter over this backend alone cannot run the strategy; empty when it can."""
    try:
        group = KVGroup(name="draft", backend=subject.backend, spec=subject.base_spec(), caches={})
        facts, no_loop = group.facts(subject.device), loop_unsupported_reason(subject.device)
        choose([facts], 4, GraphMode.FULL, forced=strategy, loop_unsupported_reason=no_loop)
    except StrategyError as error:
        return str(error)
    except Exception as error:  # a plug-in's builder may fail in any way; its checks report it too
        return f"cannot be asked: {type(error).__name__}: {error}"
    return ""


def supported_strategies(subject: Subject) -> list[Strategy]:
    """Those without a reason, in the enum's order."""
    return [strategy for strategy in Strategy if not unsupported_reason(subject, strategy)]
