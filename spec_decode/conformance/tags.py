"""What a check's result is evidence for: tags "axis:value", which are the columns of the matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attn_backends.capabilities import features_of
from builders import AttentionKind, AttentionSpec
from spec_decode.conformance.cases import Batch, Case, base_spec
from spec_decode.conformance.check import Check, Subject
from spec_decode.conformance.report import EVERYTHING
from spec_decode.drafter.kv_groups import KVGroup
from spec_decode.drafter.plan import GraphMode, Strategy, StrategyError, choose
from spec_decode.graphs import loop_unsupported_reason

_OF_FAMILY = {"contract": "contract:declared", "refusal": "contract:refusals"}
_COMPARING = ("drafter.strategies_agree", "drafter.requests_stop_on_their_own")
"""Checks that run every strategy that the backend can run."""
_ADVANCE = ("builder.advance_", "builder.plans_ahead_", "builder.padding_", "builder.limits_", "builder.step_fields_")


def tags_of(subject: Subject, check: Check) -> tuple[str, ...]:
    """The columns that a result of this check says something about.

    From the check's family and name, and from the spec, batch or strategy that its case holds. A check whose cases
    could not be made, because the backend refused them all or failed when it was asked, says it about
    everything.
    """
    if isinstance(check.value, Exception):
        return (EVERYTHING,)
    if check.family in _OF_FAMILY:
        return (_OF_FAMILY[check.family],)
    found = [*_of_name(check.name), *_strategies(subject, check)]
    if isinstance(check.value, Case):
        found += [*_of_spec(check.value.spec), *_of_batch(check.value.batch)]
    return tuple(dict.fromkeys(found))


def _of_name(name: str) -> Iterator[str]:
    if name.startswith("poison."):
        yield "contract:memory"
    if name.startswith("graph."):
        yield "graph:capture"
    if name.startswith((*_ADVANCE, "graph.")):
        yield "graph:advance"


def _of_spec(spec: AttentionSpec) -> Iterator[str]:
    yield f"dtype:{str(spec.dtype).removeprefix('torch.')}"
    if spec.cache_dtype != spec.dtype:
        quantised = spec.cache_dtype.itemsize == 1
        yield f"kv:{str(spec.cache_dtype).removeprefix('torch.') if quantised else 'mixed'}"
    yield f"page:{spec.page_size}"
    yield f"dim:{spec.head_dim}"
    yield from (f"feature:{feature.value}" for feature in features_of(spec))
    if spec.kind is AttentionKind.MLA:
        yield "feature:mla"


def _of_batch(batch: Batch) -> Iterator[str]:
    """A uniform batch is a decode or a verification; in another, each request counts as what it is by itself."""
    if batch.uniform:
        yield "mode:decode" if batch.query_lens[0] == 1 else "mode:verify"
        return
    for query, length in zip(batch.query_lens, batch.seq_lens, strict=True):
        yield "mode:decode" if query == 1 else "mode:prefill" if query == length else "mode:extend"


def _strategies(subject: Subject, check: Check) -> Iterator[str]:
    """The strategies that a drafter's case names; else all that run, where they are compared, or the one chosen."""
    if check.family != "drafter":
        return
    named = [part for part in _parts(check.value) if isinstance(part, Strategy)]
    able = [strategy for strategy in Strategy if not strategy_obstacle(subject, strategy)]
    # The device loop is run only where it is asked for.
    chosen = [strategy for strategy in able if strategy is not Strategy.DEVICE_LOOP][:1]
    for strategy in named or (able if check.name in _COMPARING else chosen):
        yield f"strategy:{strategy.value}"


def _parts(case: object) -> Sequence[object]:
    return case if isinstance(case, tuple) else (case, getattr(case, "strategy", None))


def strategy_obstacle(subject: Subject, strategy: Strategy) -> str:
    """Why a drafter over this backend alone cannot run the strategy; empty when it can."""
    try:
        group = KVGroup(name="draft", backend=subject.backend, spec=base_spec(subject), caches={})
        facts, no_loop = group.facts(subject.device), loop_unsupported_reason(subject.device)
        choose([facts], 4, GraphMode.FULL, forced=strategy, loop_unsupported_reason=no_loop)
    except StrategyError as error:
        return str(error)
    except Exception as error:  # a plug-in's builder may fail in any way; its checks say so again
        return f"cannot be asked: {type(error).__name__}: {error}"
    return ""
