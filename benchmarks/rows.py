"""Benchmark rows: their run, columns and limits."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from attn_backends import AttentionBackend, BackendError, Rejected, registry
from benchmarks.measure import DeviceRates
from builders import AdvanceLevel, AttentionSpec
from spec_decode.source_digests import SourceRecord
from spec_decode.tools.timing_limit import TimingLimit

BenchRow = dict[str, Any]

_COLUMNS = (
    *("case", "backend", "peer", "spec", "strategy", "num_reqs", "num_speculative_tokens", "context"),
    *("wall_us", "host_us", "gpu_us", "kernels_per_step", "floor_us", "floor_counts", "limits"),
)
EMPTY: BenchRow = {**dict.fromkeys(_COLUMNS), "peer": False, "limits": ()}
"""The columns of every row, null if not measured. A case can add columns."""

SEEN = "the keys and values that are seen"
"""What the floor of attention counts."""

STOPPED = "stopped by "
"""Follows the name in the note of something that started and failed."""

_NOTE_LENGTH = 500
"""Characters: a compiler's message can fill pages. The log has all of it."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Bench:
    """A run of the bench: its device, its rows, and what it could not time."""

    device: torch.device
    rates: DeviceRates | None
    """None without a GPU: there are no floors."""
    env: Mapping[str, Any] = field(default_factory=dict)
    """The fields of `spec_decode.matrix.sources.TimingEnvironment`."""
    command: str = ""
    sources: SourceRecord | None = None
    """For a run read from its report."""
    roots: dict[str, set[str]] = field(default_factory=dict)
    """The modules that time each case, by case."""
    rows: list[BenchRow] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """A line for everything without a row: a peer that is not installed, a backend that refuses."""
    stopped: list[str] = field(default_factory=list)
    """The lines of `missing` for what started and failed."""

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def floor_us(self, num_bytes: float) -> float | None:
        """Return the time to move that many bytes at the copy bandwidth."""
        return None if self.rates is None else round(self.rates.least_us(num_bytes), 3)

    def miss(self, what: str, why: object) -> str:
        """Note once what is not timed and why; return the line."""
        line = f"{what}: {' '.join(str(why).split())[:_NOTE_LENGTH]}"
        if line not in self.missing:
            self.missing.append(line)
        return line

    @contextmanager
    def noting(self, what: str, *, at: str = "") -> Iterator[None]:
        """Turn a failure of the body into a note, so that other rows are still timed.

        at: the shape it ran at. Absence or refusal does not depend on it, and is noted once.
        """
        try:
            yield
        except (ImportError, BackendError) as error:
            self.miss(what, error)
        except Exception as error:  # a kernel may fail in any way; its own message becomes the note
            where = f"{what} at {at}" if at else what
            _LOG.warning("%s stopped", where, exc_info=True)
            self.stopped.append(self.miss(where, f"{STOPPED}{type(error).__name__}: {error}"))


def with_limits(row: BenchRow, *limits: TimingLimit) -> BenchRow:
    """Return the row with its limits, each with whether the row meets it."""
    return {**row, "limits": tuple(limit.judged(row) for limit in limits)}


def serving(
    bench: Bench, case: str, specs: Sequence[AttentionSpec]
) -> Iterator[tuple[AttentionBackend, AttentionSpec]]:
    """Yield each registered backend with each spec it serves and advances in the graph; note the others."""
    for name in registry.names():
        verdicts = {spec: registry.explain(name, spec, bench.device) for spec in specs}
        if all(isinstance(verdict, Rejected) for verdict in verdicts.values()):
            reasons = [reason for verdict in verdicts.values() for reason in getattr(verdict, "reasons", ())]
            bench.miss(f"{case}/{name}", "; ".join(dict.fromkeys(reasons)))
        for spec, verdict in verdicts.items():
            if isinstance(verdict, Rejected):
                continue
            backend = registry.get(name)
            support = backend.builder.advance_support(spec, bench.device)
            if support.level is AdvanceLevel.IN_GRAPH:
                yield backend, spec
            else:
                bench.miss(f"{case}/{name}", f"{support.level.name}: {support.reason}")
