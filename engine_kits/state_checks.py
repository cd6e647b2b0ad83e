"""Family state, for engines' builders of recurrent states' metadata: random traffic against sequential runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch

from attn_backends import AttentionBackend
from builders import AdvanceLevel, AdvanceSupport, AttentionBatch, AttentionSpec, GraphSupport, MetadataBuilder
from engine_kits.engine_cache import NoAttention
from engine_kits.state_traffic import StateEngine, Traffic, Verdict, serve
from engine_kits.subjects import HEADS, backend_class
from spec_decode.conformance.check import Family
from spec_decode.conformance.coverage import CAPTURE
from spec_decode.testing.outcome import Measurements, expect
from spec_decode.testing.subject import Subject


@dataclass(frozen=True, slots=True)
class Play:
    """Traffic for an engine. graphs: which of the engine's rules says when a graph is replayed; empty for never."""

    traffic: Traffic
    graphs: str = ""


class RecurrentBackend(NoAttention):
    """The backend of a builder whose metadata drives a recurrence. recurrence: its column in the matrix."""

    recurrence: ClassVar[str]
    plays: ClassVar[Mapping[str, Play]]
    engine: ClassVar[Callable[[str], StateEngine]]
    """Make an engine around the builder that follows this rule on graphs."""


class _Claims(MetadataBuilder[Any]):
    """What an engine's builder claims. Runners of the kit call it, with batches of the engine's."""

    step_fields = ()
    reason = ""

    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(AdvanceLevel.REBUILD, cls.reason)

    def allocate(self) -> None: ...

    def build(self, batch: AttentionBatch, *, horizon: int = 0) -> Any:
        """Raise NotImplementedError: a batch of attention's says nothing of states."""
        raise NotImplementedError("metadata of states is built for an engine's batch")


def recurrent_backend(
    name: str,
    module: str,
    recurrence: str,
    plays: Mapping[str, Play],
    engine: Callable[[str], StateEngine],
    graph_support: GraphSupport,
    reason: str,
) -> type[AttentionBackend]:
    """Return the backend under test for the engine's builder of this name; the others are as in RecurrentBackend.

    module: as in `backend_class`. reason: why nothing advances its metadata in a graph.
    """
    builder = type(name, (_Claims,), {"graph_support": graph_support, "reason": reason})
    facts = {"recurrence": recurrence, "plays": plays, "engine": staticmethod(engine)}
    return backend_class(module, builder, HEADS, RecurrentBackend, **facts)


def _cases(subject: Subject) -> Iterable[tuple[str, Play]]:
    """Return no cases for a builder without states: with this module loaded, the kit requests them for all."""
    return subject.backend.plays.items() if isinstance(subject.backend, RecurrentBackend) else ()


def _replayed(subject: Subject) -> Iterable[tuple[str, Play]]:
    return [(name, play) for name, play in _cases(subject) if play.graphs]


def _covers(subject: Subject, play: Any) -> list[str]:
    assert isinstance(subject.backend, RecurrentBackend)
    return [f"recurrence:{subject.backend.recurrence}", *([CAPTURE] if play.graphs else [])]


check = Family("state", covers=_covers)


@cache
def _verdict(subject: Subject, play: Play) -> Verdict:
    """Serve the traffic once for all checks."""
    assert isinstance(subject.backend, RecurrentBackend)
    return serve(type(subject.backend).engine(play.graphs), play.traffic)


@check("after every round, a request's state and window are those of a sequential run over its accepted tokens", _cases)
def states_follow_accepted_tokens(subject: Subject, play: Play) -> Measurements:
    verdict = _verdict(subject, play)
    expect(
        not verdict.wrong,
        contract=f"{verdict.states} states follow a sequential run",
        expected="equal integers",
        got=f"{len(verdict.wrong)} wrong, first in {verdict.wrong[:1]}",
    )
    return {"states": float(verdict.states)}


@check("a round writes only the slots of the requests that run in it", _cases)
def rounds_write_their_own_slots(subject: Subject, play: Play) -> None:
    foreign = _verdict(subject, play).foreign
    expect(not foreign, contract="the slots of others keep their bytes", expected="no write", got=foreign[:1])


@check("where the engine replays a graph, the metadata of the batch is built where the graph reads", _replayed)
def builds_for_a_graph_keep_addresses(subject: Subject, play: Play) -> None:
    moved = sorted(_verdict(subject, play).moved)
    expect(not moved, contract="a graph reads the addresses of its capture", expected="the same tensors", got=moved)
