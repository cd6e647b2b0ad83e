"""What a check's result is evidence for: matrix columns, "axis:value", which every check declares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any

import torch

from attn_backends.capabilities import features_of
from attn_backends.state_capabilities import features_used
from builders import AttentionKind, AttentionSpec, StateSpec
from spec_decode.drafter import Strategy, StrategyError
from spec_decode.drafter.plan import choose_strategy
from spec_decode.graphs import loop_unsupported_reason
from spec_decode.paged import GraphMode
from spec_decode.paged.kv_groups import KVGroup
from spec_decode.testing.batches import Batch, Case
from spec_decode.testing.subject import Subject

Coverage = Callable[[Any, Any], Iterable[str]]
"""Returns the columns that a check covers on a case, its second argument."""

FAMILIES = ("contract", "builder", "numerics", "refusal", "poison", "graph", "drafter", "state", "soak")
"""Families of checks, in the order in which they run."""
ON_REQUEST = ("soak",)
"""Families that run only on request, because they take minutes."""
EVERYTHING = "*"
"""The tag for a result that applies to every column without results."""
DECLARED, REFUSALS, MEMORY = "contract:declared", "contract:refusals", "contract:memory"
CAPTURE, ADVANCE = "graph:capture", "graph:advance"
MIXED_KV = "kv:mixed"
MLA = "feature:mla"
JOURNAL = "state:journal"


def column(axis: str, value: torch.dtype | Enum | int) -> str:
    """Return the column of a value on an axis, such as page:16, dtype:bfloat16 or feature:gqa."""
    return f"{axis}:{value.value if isinstance(value, Enum) else str(value).removeprefix('torch.')}"


def only(*columns: str) -> Coverage:
    """Cover these columns, independent of the case."""
    return lambda subject, case: columns


def with_case(*columns: str) -> Coverage:
    """Cover these columns, and those of the spec and batch of a Case."""

    def covers(subject: Subject, case: Any) -> Iterator[str]:
        yield from columns
        if isinstance(case, Case):
            yield from _of_spec(case.spec)
            yield from _of_batch(case.batch)

    return covers


def _of_spec(spec: AttentionSpec) -> Iterator[str]:
    yield column("dtype", spec.dtype)
    if spec.cache_dtype != spec.dtype:
        yield column("kv", spec.cache_dtype) if spec.cache_dtype.itemsize == 1 else MIXED_KV
    yield column("page", spec.page_size)
    yield column("dim", spec.head_dim)
    yield from (column("feature", feature) for feature in features_of(spec))
    if spec.kind is AttentionKind.MLA:
        yield MLA


def _of_batch(batch: Batch) -> Iterator[str]:
    """A uniform batch is a decode or a verification; in a ragged one, each request is classified separately."""
    if batch.uniform:
        yield "mode:decode" if batch.query_lens[0] == 1 else "mode:verify"
        return
    for query, length in zip(batch.query_lens, batch.seq_lens, strict=True):
        yield "mode:decode" if query == 1 else "mode:prefill" if query == length else "mode:extend"


def of_state(*columns: str) -> Coverage:
    """Cover these columns, and those of a StateSpec, the case."""

    def covers(subject: Any, case: StateSpec) -> Iterator[str]:
        yield from (*columns, CAPTURE, JOURNAL, column("recurrence", case.recurrence))
        yield from (column("dtype", case.dtype), column("state_dtype", case.state_dtype))
        yield from (column("state", feature) for feature in features_used(case))

    return covers


def unsupported_strategies(subject: Subject) -> dict[Strategy, str]:
    """Return the strategies that a drafter with only this backend cannot run, each with the reason."""
    found: dict[Strategy, str] = {}
    try:
        group = KVGroup(name="draft", backend=subject.backend, spec=subject.base_spec(), caches={})
        facts, no_loop = group.facts(subject.device), loop_unsupported_reason(subject.device)
        for strategy in Strategy:
            try:
                choose_strategy([facts], 4, GraphMode.FULL, forced=strategy, loop_unsupported_reason=no_loop)
            except StrategyError as error:
                found[strategy] = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plug-in's builder can fail in any way; its checks report that too
        return dict.fromkeys(Strategy, f"cannot be queried: {type(error).__name__}: {error}")
    return found


def supported_strategies(subject: Subject) -> list[Strategy]:
    """Return the strategies that a drafter with only this backend can run, in the enum's order."""
    refused = unsupported_strategies(subject)
    return [strategy for strategy in Strategy if strategy not in refused]


def every_strategy(subject: Subject, case: Any) -> Iterable[str]:
    """Cover the strategies that the backend can run: for a check that compares them."""
    return [column("strategy", strategy) for strategy in supported_strategies(subject)]


def one_strategy(subject: Subject, case: Any) -> Iterable[str]:
    """Cover the strategy given by the case, else the one that a drafter chooses."""
    # The device loop runs only on request.
    able = [strategy for strategy in supported_strategies(subject) if strategy.implementation.automatic]
    return [column("strategy", each) for each in ([case] if isinstance(case, Strategy) else able[:1])]
