"""What a check's result is evidence for: columns of the matrix, "axis:value", which every check declares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from attn_backends import Feature, FusedWrite
from attn_backends.capabilities import features_of
from builders import AttentionKind, AttentionSpec
from spec_decode.drafter import Strategy, StrategyError
from spec_decode.drafter.plan import choose
from spec_decode.graphs import loop_unsupported_reason
from spec_decode.paged import GraphMode
from spec_decode.paged.kv_groups import KVGroup
from spec_decode.testing.batches import Batch, Case
from spec_decode.testing.subject import Subject

Coverage = Callable[[Subject, Any], Iterable[str]]
"""The columns that a check on a case, its second argument, covers."""

FAMILIES = ("contract", "builder", "numerics", "refusal", "poison", "graph", "drafter", "soak")
"""Of checks, in the order in which they run."""
ON_REQUEST = ("soak",)
"""Those that run only if they are asked for: they take minutes."""
EVERYTHING = "*"
"""The tag of what holds for every column that has nothing of its own."""
DECLARED, REFUSALS, MEMORY = "contract:declared", "contract:refusals", "contract:memory"
CAPTURE, ADVANCE = "graph:capture", "graph:advance"
MIXED_KV = "kv:mixed"
MLA = "feature:mla"


def dtype_column(dtype: torch.dtype) -> str:
    """Queries of this dtype."""
    return f"dtype:{_name(dtype)}"


def kv_column(dtype: torch.dtype) -> str:
    """A quantised KV cache of this dtype."""
    return f"kv:{_name(dtype)}"


def page_column(size: int) -> str:
    """Pages of so many tokens."""
    return f"page:{size}"


def dim_column(head_dim: int) -> str:
    """Key heads of this size."""
    return f"dim:{head_dim}"


def feature_column(feature: Feature) -> str:
    """A feature of the spec."""
    return f"feature:{feature.value}"


def fused_write_column(write: FusedWrite) -> str:
    """A cache write that a backend declares to be fused."""
    return f"fused_write:{write.value}"


def only(*columns: str) -> Coverage:
    """These columns, whatever the case is."""
    return lambda subject, case: columns


def with_case(*columns: str) -> Coverage:
    """These columns, and what the spec and the batch of a Case ask for."""

    def covers(subject: Subject, case: Any) -> Iterator[str]:
        yield from columns
        if isinstance(case, Case):
            yield from _of_spec(case.spec)
            yield from _of_batch(case.batch)

    return covers


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _of_spec(spec: AttentionSpec) -> Iterator[str]:
    yield dtype_column(spec.dtype)
    if spec.cache_dtype != spec.dtype:
        yield kv_column(spec.cache_dtype) if spec.cache_dtype.itemsize == 1 else MIXED_KV
    yield page_column(spec.page_size)
    yield dim_column(spec.head_dim)
    yield from map(feature_column, features_of(spec))
    if spec.kind is AttentionKind.MLA:
        yield MLA


def _of_batch(batch: Batch) -> Iterator[str]:
    """A uniform batch is a decode or a verification; in another, each request counts as what it is by itself."""
    if batch.uniform:
        yield "mode:decode" if batch.query_lens[0] == 1 else "mode:verify"
        return
    for query, length in zip(batch.query_lens, batch.seq_lens, strict=True):
        yield "mode:decode" if query == 1 else "mode:prefill" if query == length else "mode:extend"


def unsupported_strategies(subject: Subject) -> dict[Strategy, str]:
    """Why a drafter over this backend alone cannot run a strategy; those that it can run are left out."""
    found: dict[Strategy, str] = {}
    try:
        group = KVGroup(name="draft", backend=subject.backend, spec=subject.base_spec(), caches={})
        facts, no_loop = group.facts(subject.device), loop_unsupported_reason(subject.device)
        for strategy in Strategy:
            try:
                choose([facts], 4, GraphMode.FULL, forced=strategy, loop_unsupported_reason=no_loop)
            except StrategyError as error:
                found[strategy] = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plug-in's builder may fail in any way; its checks report it too
        return dict.fromkeys(Strategy, f"cannot be asked: {type(error).__name__}: {error}")
    return found


def supported_strategies(subject: Subject) -> list[Strategy]:
    """Those that a drafter over this backend alone can run, in the enum's order."""
    refused = unsupported_strategies(subject)
    return [strategy for strategy in Strategy if strategy not in refused]


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
