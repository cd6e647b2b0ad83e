"""Timings as small multiples: what is compared stands in one panel, and each panel is one shape."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from spec_decode.matrix.provenance import Runs
from spec_decode.matrix.sources import Quantiles, Timing

_PEER = " (peer)"


class Bar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One timing. us: None where nothing is launched. limit, floor: microseconds, where the timing has them.

    bound: the limits in words, and met: whether they are kept.
    """

    label: str
    spec: str
    peer: bool
    us: Quantiles | None
    floor: float | None
    limit: float | None
    bound: str
    met: bool | None
    run: int


class Panel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One shape; its bars are comparable with each other."""

    title: str
    bars: tuple[Bar, ...]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The panels of one measured thing on one device. spec: of the attention, where one is compared."""

    title: str
    spec: str
    device: str
    quantity: str
    panels: tuple[Panel, ...]


_QUANTITIES = {
    "gpu_us": "GPU time, µs",
    "host_us": "host time, µs",
    "token_us": "time of a token of one request, µs",
}
_DRAFTS = {
    "llama3-8b-eagle": "Llama-3-8B's EAGLE",
    "qwen3-8b-eagle3": "Qwen3-8B's EAGLE-3",
    "gpt-oss-20b-eagle3": "GPT-OSS-20B's EAGLE-3",
    "glm-4.7-flash-mtp": "GLM-4.7-Flash's MTP",
    "deepseek-v4-mtp": "DeepSeek-V4's MTP",
    "eagle-1024": "an EAGLE draft 1024 wide",
}
TITLES = {
    "paged-decode": "Decode attention over paged KV",
    "mla-decode": "Decode attention over latents (MLA)",
    "sparse-decode": "Decode attention over a sparse window (MLA)",
    "flashinfer-decode": "Decode attention by FlashInfer: its choice beside each kernel",
    "advance": "Advancing the metadata by one token",
    "step": "One step: advance, write, attend",
    "round": "A whole draft round",
    "round/steps": "Steps 1 to K-1 of a draft round",
    **{f"{name}/round": f"A whole draft round of {words}" for name, words in _DRAFTS.items()},
    **{f"{name}/steps": f"Steps 1 to K-1 of {words}" for name, words in _DRAFTS.items()},
    "throughput/speculation": "A whole engine: speculation beside plain decoding",
    "throughput/extend-graph": "A whole engine: step 0 of the draft in a graph, or launched",
    "sampling/top-k": "Logits restricted to top-k, beside FlashInfer's sampling",
    "sampling/top-p": "Probabilities restricted to top-p, beside FlashInfer's sampling",
    "sampling/top-k and top-p": "Probabilities restricted to both, beside FlashInfer's sampling",
    "sampling/draw a draft token": "Drawing a draft token, beside FlashInfer's sampling",
    "sampling/draw a target token": "Drawing the target's token, beside FlashInfer's sampling",
    "sampling/draw a restricted target token": "The same with top-k and top-p, beside FlashInfer's sampling",
    "sampling/argmax": "The most likely token, beside torch",
}
"""By case, its backend left out; other cases go by their own name. Also the order of the sections."""


def speed_sections(timings: Sequence[Timing], runs: Runs) -> tuple[Section, ...]:
    """Sections by what was timed, its quantity and, for one attention, its spec; newest timings first."""
    groups: dict[tuple[str, str, str, str], list[Timing]] = {}
    for timing in sorted(timings, key=lambda timing: timing.env.date, reverse=True):
        for quantity in _quantities(timing):
            groups.setdefault((_subject(timing), timing.env.device, quantity, _own_spec(timing)), []).append(timing)
    order = list(TITLES)
    ranked = sorted(groups.items(), key=lambda item: order.index(item[0][0]) if item[0][0] in order else len(order))
    return tuple(_section(*key, found, runs) for key, found in ranked)


def _subject(timing: Timing) -> str:
    """The case without the backend that it may name."""
    return "/".join(part for part in timing.case.split("/") if part != timing.backend and not part.endswith("-groups"))


def _shape_spec(timing: Timing) -> str:
    """What a panel is about beside its size: what is sampled from belongs to the shape."""
    return timing.spec or "" if timing.case.startswith("sampling/") else ""


def _own_spec(timing: Timing) -> str:
    """What a section is about beside its case: comparisons of one attention are made at one spec."""
    return timing.spec or "" if timing.case.endswith("-decode") else ""


def _quantities(timing: Timing) -> list[str]:
    """A round is timed on the host and on the GPU; what has no launch is shown as that; an engine by its tokens."""
    if timing.token_us is not None:
        return ["token_us"]
    found = [name for name in _QUANTITIES if getattr(timing, name) is not None]
    return found if timing.strategy is not None else ["gpu_us"] if timing.gpu_us or timing.kernels_per_step == 0 else []


def _section(subject: str, device: str, quantity: str, spec: str, timings: Sequence[Timing], runs: Runs) -> Section:
    shapes: dict[tuple[int, int, int, str], list[Timing]] = {}
    for timing in timings:
        # Engines that draft different numbers of tokens are compared; rounds of different lengths are not.
        tokens = 0 if timing.token_us else timing.num_speculative_tokens or 0
        shape = (tokens, timing.num_reqs, timing.context or 0, _shape_spec(timing))
        shapes.setdefault(shape, []).append(timing)
    return Section(
        title=TITLES.get(subject, subject),
        spec=spec,
        device=device,
        quantity=_QUANTITIES[quantity],
        panels=tuple(
            Panel(title=_shape(*shape), bars=_bars(found, quantity, runs)) for shape, found in sorted(shapes.items())
        ),
    )


def _shape(tokens: int, num_reqs: int, context: int, spec: str) -> str:
    parts = [f"{num_reqs} request{'s' if num_reqs > 1 else ''}"]
    parts += [f"K = {tokens}"] if tokens else []
    parts += [f"{context:,} tokens each"] if context and not tokens else []
    parts += [spec] if spec else []
    return ", ".join(parts)


def _bars(timings: Sequence[Timing], quantity: str, runs: Runs) -> tuple[Bar, ...]:
    labels = _labels(timings)
    return tuple(
        Bar(
            label=label,
            spec="" if _shape_spec(timing) else timing.spec or "",
            peer=timing.backend.endswith(_PEER),
            us=getattr(timing, quantity),
            floor=timing.floor_us if quantity == "gpu_us" else None,
            limit=_limit(timing.limit or "", quantity),
            bound=bound,
            met=met,
            run=runs.number("bench", timing.env.plain, timing.command),
        )
        for timing, label in zip(timings, labels, strict=True)
        for bound, met in [_verdict(timing, quantity)]
    )


def _verdict(timing: Timing, quantity: str) -> tuple[str, bool | None]:
    """The limits that are not on another drawn quantity, and whether they are kept, as far as the row can tell."""
    limits = timing.limit.split(" and ") if timing.limit else []
    mine = [words for words in limits if not any(other in words for other in _QUANTITIES if other != quantity)]
    known = timing.met or mine == limits
    return " and ".join(mine), timing.met if mine and known else None


def _labels(timings: Sequence[Timing]) -> list[str]:
    """Each timing's backend, with what sets it apart from the panel's others of the same backend."""
    labels = []
    for timing in timings:
        twins = [other for other in timings if other.backend == timing.backend]
        strategies, cases = ({getattr(twin, name) for twin in twins} for name in ("strategy", "case"))
        apart = [timing.strategy or ""] if len(strategies) > 1 and timing.token_us is None else []
        apart += _engine(timing)
        apart += [timing.case.split("/")[-1]] if len(cases) > 1 else []
        apart += [_spec_apart(timing, twins)]
        newest = max(twin.env.date for twin in twins if _same(timing, twin))
        apart += ["(older)"] if timing.env.date < newest else []
        labels.append(" ".join([timing.backend.removesuffix(_PEER), *filter(None, apart)]))
    return labels


def _engine(timing: Timing) -> list[str]:
    """How a whole engine decoded."""
    if timing.token_us is None:
        return []
    drafted = timing.num_speculative_tokens
    found = [f"K = {drafted}, {timing.accepted:.1f} kept" if drafted and timing.accepted is not None else "plain"]
    if timing.case.endswith("extend-graph"):
        found += ["in a graph" if timing.extend_in_graph else "launched"]
        found += ["host waits"] if timing.host_waits else []
    return [", ".join(found)]


def _same(one: Timing, other: Timing) -> bool:
    return _identity(one) == _identity(other)


def _identity(timing: Timing) -> tuple[object, ...]:
    return (timing.case, timing.backend, timing.spec, timing.strategy, *_engine(timing))


def _spec_apart(timing: Timing, twins: Sequence[Timing]) -> str:
    """The parts of its spec that not all of its twins have."""
    specs = [set((twin.spec or "").split(", ")) for twin in twins]
    common = set.intersection(*specs)
    return ", ".join(part for part in (timing.spec or "").split(", ") if part not in common)


def _limit(words: str, quantity: str) -> float | None:
    found = re.search(rf"\b{quantity} <= ([0-9.]+)", words)
    return float(found[1]) if found else None
