"""What a machine has for drafting, and what stands in the way: each answer with its reason, none an exception."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version

import torch

from attn_backends import BrokenBackend, Rejected, registry
from builders import CONTRACT_VERSION, AttentionKind, AttentionSpec
from spec_decode.environment import environment
from spec_decode.graphs import runtime_for

_PACKAGES = (
    "attn-backends",
    "torch",
    "triton",
    "flashinfer-python",
    "flash-attn-3",
    "vllm",
    "sgl-kernel",
    "flash-mla",
    "transformers",
    "cuda-python",
)
"""Whatever may bring a kernel, a model or a graph's node."""

_SPECS = {
    "decode of a common 8B model": AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, page_size=16),
    "dense latent attention": AttentionSpec(
        num_q_heads=16, num_kv_heads=1, head_dim=576, value_dim=512, page_size=64, kind=AttentionKind.MLA
    ),
    "sparse sliding-window latent attention": AttentionSpec(
        num_q_heads=64,
        num_kv_heads=1,
        head_dim=512,
        page_size=64,
        sliding_window=128,
        sinks=True,
        kind=AttentionKind.MLA,
    ),
}


class State(str, Enum):
    """How a finding stands."""

    FINE = "fine"
    ABSENT = "absent"
    """Not here; nothing is wrong with what is."""
    REFUSED = "refused"
    """Here, and it serves none of what was asked."""
    FAILED = "failed"
    """Here, and it does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer: of which topic, about what, how it stands and in which words."""

    topic: str
    subject: str
    state: State
    words: str


def examine(device: torch.device) -> Iterator[Finding]:
    """Everything found out about drafting on that device, topic by topic."""
    yield from _machine(device)
    yield from _packages()
    yield from _graphs(device)
    yield from _backends(device)
    yield from _plug_ins()


def _machine(device: torch.device) -> Iterator[Finding]:
    where = environment(device)
    for subject in ("device", "driver", "cuda", "torch", "triton", "python", "platform", "commit"):
        words = getattr(where, subject)
        unknown = words is None or str(words).startswith("unknown")
        yield Finding("machine", subject, State.ABSENT if unknown else State.FINE, str(words or "none"))
    yield Finding("machine", "contract", State.FINE, ".".join(map(str, CONTRACT_VERSION)))
    if device.type == "cuda":
        yield _tried("machine", "compute capability", lambda: "{}.{}".format(*torch.cuda.get_device_capability(device)))
        yield _tried("machine", "memory", lambda: _memory(device))


def _memory(device: torch.device) -> str:
    free, total = torch.cuda.mem_get_info(device)
    return f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"


def _packages() -> Iterator[Finding]:
    for name in _PACKAGES:
        try:
            yield Finding("packages", name, State.FINE, version(name))
        except PackageNotFoundError:
            yield Finding("packages", name, State.ABSENT, "not installed")


def _graphs(device: torch.device) -> Iterator[Finding]:
    yield _tried("graphs", "capture and replay", lambda: _captures(device))


def _captures(device: torch.device) -> str:
    runtime, cell = runtime_for(device), torch.zeros(1, dtype=torch.int64, device=device)
    before = runtime.memory_used()
    graph = runtime.capture(lambda: cell.add_(1))
    used = runtime.memory_used() - before
    if (untouched := int(cell)) != 0:
        raise RuntimeError(f"a capture must not execute, it left {untouched} in a cell that held 0")
    graph.replay()
    graph.replay()
    if (found := int(cell)) != 2:
        raise RuntimeError(f"two replays of an addition must give 2, got {found}")
    kind = "a CUDA graph" if device.type == "cuda" else "emulated on the CPU"
    return f"works ({kind}), {used / 2**20:.1f} MiB for one node"


def _backends(device: torch.device) -> Iterator[Finding]:
    for name in registry.names():
        try:
            backend = registry.get(name)
        except BrokenBackend as error:
            yield Finding("backends", name, State.ABSENT, str(error))
            continue
        verdicts = {asked: backend.supports(spec, device) for asked, spec in _SPECS.items()}
        served = [asked for asked, verdict in verdicts.items() if not isinstance(verdict, Rejected)]
        reasons = {reason for verdict in verdicts.values() for reason in getattr(verdict, "reasons", ())}
        words = f"{backend.version}: {'; '.join(served) or '; '.join(sorted(reasons))}"
        yield Finding("backends", name, State.FINE if served else State.REFUSED, words)


def _plug_ins() -> Iterator[Finding]:
    for point in entry_points(group=registry.ENTRY_POINT_GROUP):
        yield _tried("plug-ins", point.name, partial(_loaded, point))


def _loaded(point: EntryPoint) -> str:
    backend, package = registry.get(point.name), point.dist.name if point.dist else "an unknown package"
    return f"{package}: {type(backend).__module__}.{type(backend).__qualname__} {backend.version}"


def _tried(topic: str, subject: str, ask: Callable[[], str]) -> Finding:
    try:
        return Finding(topic, subject, State.FINE, ask())
    except Exception as error:  # a diagnosis must survive whatever it looks at
        return Finding(topic, subject, State.FAILED, f"{type(error).__name__}: {error}")
