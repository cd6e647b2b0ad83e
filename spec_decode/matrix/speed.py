"""Timings as small multiples: a panel per shape, with everything compared at that shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from spec_decode.matrix.cells import Runs
from spec_decode.matrix.sources import Quantiles, Timing
from spec_decode.matrix.text import counted
from spec_decode.tools.timing_limit import TimingLimit, verdict


class Bar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One timing. us: None for no launch. limit, floor: microseconds, if the timing has them.

    limits: those on this quantity and on columns that are not drawn. changed: the modules behind it that have changed
    since.
    """

    label: str
    spec: str
    peer: bool
    us: Quantiles | None
    floor: float | None
    limit: float | None
    limits: tuple[TimingLimit, ...]
    run: int
    changed: tuple[str, ...] = ()

    @property
    def met(self) -> bool | None:
        """Whether all limits are met: False if one is missed, else None if one is open or there are none."""
        return verdict(self.limits)[1]


class Panel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One shape; its bars are comparable with each other, fastest first, and have distinct labels."""

    title: str
    bars: tuple[Bar, ...]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The panels of one measurement on one device. spec: the attention spec, if one is compared."""

    title: str
    spec: str
    device: str
    quantity: str
    panels: tuple[Panel, ...]


_QUANTITIES = {"gpu_us": "GPU time, µs", "host_us": "host time, µs", "token_us": "time per token of one request, µs"}
_DRAFTS_DIFFER = ("block-drafts", "block-trees", "block-tree-rounds")
"""Whole-engine cases that are distinguished by their draft."""


def speed_sections(timings: Sequence[Timing], runs: Runs) -> tuple[Section, ...]:
    """Return a section for each thing timed, its quantity and, for one attention, its spec. They are in order of their
    titles, with newer timings first."""
    groups: dict[tuple[str, str, str, str], list[Timing]] = {}
    for timing in sorted(timings, key=lambda timing: timing.env.date, reverse=True):
        for quantity in _quantities(timing):
            groups.setdefault((timing.case, timing.env.device, quantity, _own_spec(timing)), []).append(timing)
    by_title = sorted(groups.items(), key=lambda item: item[1][0].title)
    return tuple(_section(*key[1:], found, runs) for key, found in by_title)


def _shape_spec(timing: Timing) -> str:
    """Return the part of a panel's shape besides its size: for sampling and products, the spec."""
    return timing.spec or "" if timing.case.startswith(("sampling/", "products")) else ""


def _own_spec(timing: Timing) -> str:
    """Return the part of a section's key besides its case: comparisons of one attention use one spec."""
    return timing.spec or "" if timing.case.endswith("-decode") else ""


def _quantities(timing: Timing) -> list[str]:
    """A round is timed on the host and on the GPU; a row without a launch is shown as such; an engine by its tokens."""
    if timing.token_us is not None:
        return ["token_us"]
    found = [name for name in _QUANTITIES if getattr(timing, name) is not None]
    return found if timing.strategy is not None else ["gpu_us"] if timing.gpu_us or timing.kernels_per_step == 0 else []


def _section(device: str, quantity: str, spec: str, timings: Sequence[Timing], runs: Runs) -> Section:
    shapes: dict[tuple[int, int, int, int, str], list[Timing]] = {}
    for timing in timings:
        # Engines with different numbers of draft tokens are compared; rounds of different lengths are not.
        tokens = 0 if timing.token_us else timing.num_speculative_tokens or 0
        shape = (tokens, timing.num_tokens or 0, timing.num_reqs, timing.context or 0, _shape_spec(timing))
        shapes.setdefault(shape, []).append(timing)
    return Section(
        title=timings[0].title,
        spec=spec,
        device=device,
        quantity=_QUANTITIES[quantity],
        panels=tuple(_panel(_shape(*shape), found, quantity, runs) for shape, found in sorted(shapes.items())),
    )


def _panel(title: str, timings: Sequence[Timing], quantity: str, runs: Runs) -> Panel:
    bars = [_bar(each, _label(each, timings), quantity, runs) for each in timings]
    bars.sort(key=lambda bar: bar.us.p50 if bar.us else 0.0)
    return Panel(title=title, bars=tuple(_disambiguated(bars)))


def _disambiguated(bars: Sequence[Bar]) -> Iterator[Bar]:
    """Yield bars whose equal labels get the run appended, and a number too if they share the run."""
    alike = Counter((bar.label, bar.peer) for bar in bars)
    of_one_run = Counter((bar.label, bar.peer, bar.run) for bar in bars)
    seen: Counter[tuple[str, bool, int]] = Counter()
    for bar in bars:
        key = (bar.label, bar.peer, bar.run)
        seen[key] += 1
        number = f", {seen[key]} of {of_one_run[key]}" if of_one_run[key] > 1 else ""
        ambiguous = alike[key[:2]] > 1
        yield msgspec.structs.replace(bar, label=f"{bar.label} (run {bar.run + 1}{number})") if ambiguous else bar


def _shape(tokens: int, num_tokens: int, num_reqs: int, context: int, spec: str) -> str:
    parts = [counted(num_reqs, "request")]
    parts += [f"K = {tokens}"] if tokens else []
    parts += [f"{counted(num_tokens, 'query token')} each"] if num_tokens else []
    parts += (
        [f"{context:,} cached tokens each" if num_tokens else f"{context:,} tokens each"]
        if context and not tokens
        else []
    )
    parts += [spec] if spec else []
    return ", ".join(parts)


def _bar(timing: Timing, label: str, quantity: str, runs: Runs) -> Bar:
    limits = tuple(limit for limit in timing.limits if limit.column == quantity or limit.column not in _QUANTITIES)
    most = [limit.bound for limit in limits if limit.column == quantity and not limit.at_least]
    return Bar(
        label=label,
        spec="" if _shape_spec(timing) else timing.spec or "",
        peer=timing.peer,
        us=getattr(timing, quantity),
        floor=timing.floor_us if quantity == "gpu_us" else None,
        limit=min(most, default=None),
        limits=limits,
        run=runs.number("bench", timing.env.plain, timing.command),
        changed=timing.changed,
    )


def _label(timing: Timing, timings: Sequence[Timing]) -> str:
    """Return the timing's backend, with what distinguishes it from others of the same backend in the panel."""
    twins = [other for other in timings if (other.backend, other.peer) == (timing.backend, timing.peer)]
    several = len({twin.strategy for twin in twins}) > 1 and timing.token_us is None
    several_temperatures = len({twin.temperature for twin in twins if twin.strategy == timing.strategy}) > 1
    newest = max(twin.env.date for twin in twins if _identity(timing) == _identity(twin))
    parts = [
        timing.backend,
        (timing.strategy or "") if several else "",
        *_engine(timing),
        f"temperature {timing.temperature:g}" if several_temperatures and timing.temperature is not None else "",
        f"{timing.num_groups}-groups" if timing.num_groups else "",
        "" if timing.tree is None else "a tree" if timing.tree else "a chain",
        _differing_spec(timing, twins),
        "(older)" if timing.env.date < newest else "",
    ]
    return " ".join(filter(None, parts))


def _engine(timing: Timing) -> list[str]:
    """Describe how a whole engine decoded."""
    if timing.token_us is None:
        return []
    drafted = timing.num_speculative_tokens
    found = [f"K = {drafted}, {timing.accepted:.1f} accepted" if drafted and timing.accepted is not None else "plain"]
    found += [timing.draft] if timing.draft and timing.case.endswith(_DRAFTS_DIFFER) else []
    if timing.case.endswith("extend-graph"):
        found += ["in a graph" if timing.extend_in_graph else "launched"]
    if timing.case.endswith("one-graph"):
        found += ["one graph" if timing.one_graph else "two graphs"]
    found += ["host waits"] if timing.host_waits else []
    found += ["batch invariant"] if timing.batch_invariant else []
    return [", ".join(found)]


def _identity(timing: Timing) -> tuple[object, ...]:
    what = (timing.case, timing.backend, timing.spec, timing.strategy, timing.temperature, timing.num_groups)
    return *what, timing.tree, *_engine(timing)


def _differing_spec(timing: Timing, twins: Sequence[Timing]) -> str:
    """Return the parts of its spec that not all of its twins share."""
    specs = [set((twin.spec or "").split(", ")) for twin in twins]
    common = set.intersection(*specs)
    return ", ".join(part for part in (timing.spec or "").split(", ") if part not in common)
