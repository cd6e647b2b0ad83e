"""Autotuning: measure the fastest strategy for a drafter's shape once on this machine, and cache the result.

Which strategy is fastest depends on the host, the device and the model's size. An unrolled loop saves host work but
takes graph memory; a device loop needs the least of both but adds a little device time to every step. A measurement
decides only if no strategy is requested.
"""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from builders import RequestTables
from builders.errors import require
from spec_decode.drafter.config import DrafterConfig
from spec_decode.drafter.drafter import Drafter
from spec_decode.drafter.plan import DraftPlan
from spec_decode.drafter.strategies import Strategy
from spec_decode.environment import Environment, environment
from spec_decode.files import write_whole
from spec_decode.model_api import DraftModel
from spec_decode.paged.kv_groups import KVGroup

SCHEMA = "attn-strategy/1"
MARGIN = 0.02
"""The fraction by which another strategy must beat the default choice, so that noise does not decide."""

_WARM_UP, _REPEATS = 3, 15
_LARGEST_FILE = 1 << 16


class Measurement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured, and where.

    shape: everything that the result depends on, in words. wall_us: median microseconds of a round per strategy, from
    the call until the device is done. not_measured: why each other strategy was not measured.
    """

    schema: str = SCHEMA
    shape: dict[str, str]
    strategy: Strategy
    wall_us: dict[str, float]
    not_measured: dict[str, str]
    env: Environment

    def explain(self) -> str:
        """Return one line with the choice and the times."""
        times = ", ".join(f"{name} {us:.0f} us" for name, us in self.wall_us.items())
        return f"{self.strategy.value}: fastest of {times} a round, measured {self.env.date} on {self.env.device}"


class StrategyCache:
    """Measurements on disk, one file each.

    Anything invalid counts as missing and is measured again: an unreadable or malformed file, a file for another shape,
    one larger than any measurement, or a path that is not a file.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """folder: None uses ATTN_BACKENDS_CACHE, else attn-backends in the user's cache folder.

        Raises BatchError if neither the environment nor a home folder determines it.
        """
        base = os.environ.get("ATTN_BACKENDS_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        tail = "strategies" if os.environ.get("ATTN_BACKENDS_CACHE") else "attn-backends/strategies"
        self.folder = folder or Path(os.path.expanduser(base)) / tail
        require(
            not str(self.folder).startswith("~"),
            f"autotuning saves its result in {self.folder}, but there is no home folder. Set ATTN_BACKENDS_CACHE to a "
            "folder, or choose a strategy.",
        )

    def get(self, shape: dict[str, str]) -> Measurement | None:
        """Return the measurement of exactly this shape, or None."""
        try:
            path = self._path(shape)
            if not path.is_file() or path.stat().st_size > _LARGEST_FILE:
                return None
            found = msgspec.json.decode(path.read_bytes(), type=Measurement)
        except (OSError, ValueError, RecursionError):
            return None
        return found if found.schema == SCHEMA and found.shape == shape else None

    def put(self, measurement: Measurement) -> None:
        """Store it, replacing an earlier one atomically: other processes never see a partial file.

        If the folder is not writable, warn with a RuntimeWarning and store nothing; the measurement is still valid.
        """
        try:
            write_whole(self._path(measurement.shape), msgspec.json.encode(measurement))
        except OSError as error:
            warnings.warn(
                f"the measured strategy, {measurement.strategy.value}, is used, but could not be saved in "
                f"{self.folder}: {error}. The next start measures again, which takes seconds. Make it writable, set "
                "ATTN_BACKENDS_CACHE to another folder, or choose a strategy.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _path(self, shape: dict[str, str]) -> Path:
        key = hashlib.sha256(msgspec.json.encode(shape, order="sorted")).hexdigest()[:24]
        return self.folder / f"{key}.json"


def autotune_strategy(
    model: DraftModel,
    groups: Sequence[KVGroup],
    tables: RequestTables,
    config: DrafterConfig,
    plan: DraftPlan,
    *,
    cache: StrategyCache | None = None,
    clock: Callable[[Drafter], float] | None = None,
) -> Measurement:
    """Return the fastest strategy for tables of this size, from the cache or measured now, which takes seconds.

    Call it before any request: it runs rounds of dummy requests over the groups' caches and leaves the tables empty.

    plan: the result of `plan_draft`, with its default choice.
    config: only num_speculative_tokens, tree, graph_mode and loop_steps matter; the measurement uses defaults for the
    rest.
    clock: returns the microseconds of one round of a drafter with loaded tables; None measures wall time.

    Raises BatchError if the caches have no room for a dummy request.
    """
    cache = cache or StrategyCache()
    timed = [strategy for strategy in Strategy if strategy.implementation.autotuned]
    supported = list(
        dict.fromkeys([plan.strategy, *(strategy for strategy in timed if strategy not in plan.unsupported)])
    )
    shape = _shape(model, groups, tables, config)
    if (known := cache.get(shape)) is not None and _fits(known, supported):
        return known
    times: dict[str, float] = {}
    if len(supported) > 1:
        room = _tokens_of_a_round(model, config)
        _load_dummies(tables, room + 1)
        candidate = DrafterConfig(
            num_speculative_tokens=config.num_speculative_tokens,
            tree=config.tree,
            graph_mode=config.graph_mode,
            capture_sizes=[tables.num_live],
            loop_steps=config.loop_steps,
        )
        try:
            for strategy in supported:
                drafter = Drafter(model, groups, tables, candidate, plan.autotuned(strategy, "to be timed"))
                times[strategy.value] = round(clock(drafter) if clock else _wall_us(drafter, room), 2)
                drafter.graphs.release()
                # Free its buffers before the next drafter allocates: there may be no room for both.
                del drafter
        finally:
            tables.load([[] for _ in groups], [])
    measurement = Measurement(
        shape=shape,
        strategy=_best(supported, times),
        wall_us=times,
        not_measured={strategy.value: plan.unsupported[strategy] for strategy in timed if strategy in plan.unsupported},
        env=environment(tables.device),
    )
    if times:
        cache.put(measurement)
    return measurement


def _fits(known: Measurement, supported: Sequence[Strategy]) -> bool:
    """Return whether it could have been measured here: it times exactly these strategies and picks their best."""
    timed = known.wall_us.keys() == {strategy.value for strategy in supported}
    return timed and min(known.wall_us.values()) > 0 and known.strategy is _best(supported, known.wall_us)


def _best(supported: Sequence[Strategy], times: dict[str, float]) -> Strategy:
    if not times:
        return supported[0]
    best = min(supported, key=lambda strategy: times[strategy.value])
    return best if times[best.value] < (1 - MARGIN) * times[supported[0].value] else supported[0]


def _shape(
    model: DraftModel, groups: Sequence[KVGroup], tables: RequestTables, config: DrafterConfig
) -> dict[str, str]:
    """Return everything that the times depend on, in words."""
    where = environment(tables.device)
    # Include buffers: 8-bit weights are stored as buffers.
    weight_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return {
        "model": f"{type(model).__name__}, {weight_bytes} bytes of weights",
        "groups": "; ".join(f"{g.backend.name} {g.backend.version} [{g.spec.describe()}]" for g in groups),
        "num_reqs": str(tables.max_reqs),
        "num_speculative_tokens": str(config.num_speculative_tokens),
        "tree": str(config.tree),
        "max_seq_len": str(tables.max_seq_len),
        "graph_mode": config.graph_mode.value,
        "loop_steps": str(config.loop_steps),
        "device": where.device,
        "driver": str(where.driver),
        "torch": where.torch,
        "triton": where.triton,
    }


def _tokens_of_a_round(model: DraftModel, config: DrafterConfig) -> int:
    """Return the most places that a round takes in a request."""
    tokens = config.num_speculative_tokens
    later = config.tree.width * (tokens - 1) if config.tree and not model.drafts_at_once else 0
    return 2 * tokens + 2 + later


def _load_dummies(tables: RequestTables, least: int) -> None:
    """Load as many requests as rows and pages allow, each with its own pages for at least `least` tokens."""
    sizes, counts = list(tables.page_sizes_host), list(tables.num_pages)
    rows = min(tables.max_reqs, *(count // -(-least // size) for size, count in zip(sizes, counts, strict=True)))
    require(
        rows > 0,
        f"autotuning needs room for a request of {least} tokens in every KV group, got {counts} pages of {sizes} "
        "tokens. Allocate more pages, or choose a strategy.",
    )
    limit = min(tables.max_seq_len, *(count // rows * size for size, count in zip(sizes, counts, strict=True)))
    pages = []
    for size, count in zip(sizes, counts, strict=True):
        stride, needed = count // rows, -(-limit // size)
        pages.append([list(range(row * stride, row * stride + needed)) for row in range(rows)])
    tables.load(pages, [limit] * rows)


def _wall_us(drafter: Drafter, room: int) -> float:
    """room: the most tokens that a round takes."""
    tables = drafter.tables
    drafter.inputs.context_lens.fill_(max(1, tables.longest - room))
    samples = []
    for _ in range(_WARM_UP + _REPEATS):
        start = time.perf_counter()
        drafter.propose()
        if tables.device.type == "cuda":
            torch.cuda.synchronize(tables.device)
        samples.append((time.perf_counter() - start) * 1e6)
    return float(torch.tensor(samples[_WARM_UP:]).median())
