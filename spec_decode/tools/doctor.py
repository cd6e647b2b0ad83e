"""What a machine has for drafting, and what is missing or fails: each finding has a reason; no failure is raised."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from attn_backends import Accepted, AttentionBackend, BrokenBackend, MissingPackage, StateBackend, registry
from attn_backends.capabilities import Capabilities, capability_reasons
from attn_backends.fa3_providers import PROVIDER_VARIABLE, PROVIDERS, BrokenProvider, load_provider
from attn_backends.findings import Finding, FindingStatus
from attn_backends.registry import PlugIn
from attn_backends.state_capabilities import StateCapabilities
from builders import CONTRACT_VERSION, Recurrence
from builders.chips import CHIPS, Chip, evidence_for
from spec_decode.environment import KERNEL_PACKAGES, environment
from spec_decode.graphs import loop_unsupported_reason, runtime_for
from spec_decode.tools.plug_ins import try_plug_ins
from spec_decode.tools.specs import GATED_DELTA, GQA, MLA, SPARSE
from spec_decode.tools.validated_rounds import validate_rounds

_PACKAGES = ("attn-backends", "torch", "triton", *KERNEL_PACKAGES, "transformers", "cuda-python")
"""Packages that can provide a kernel, a model or a graph node."""

TESTED: dict[str, tuple[str, ...]] = {
    "torch": ("2.9.0", "2.13.0", "2.15.0"),
    "triton": ("3.5.0", "3.7.1", "3.9.0"),
    "flashinfer-python": ("0.7.2.post1",),
    "transformers": ("4.57.1", "5.23.0", "5.24.0"),
}
"""The releases that the tests run with: the oldest (`make oldest`), the one of every commit, and the newest (`make
newest`); for FlashInfer, which needs a GPU, only the one of the GPU reports."""

_SPECS = {
    "decode of a common 8B model": GQA,
    "dense latent attention": MLA,
    "sparse sliding-window latent attention": SPARSE,
}
_STATE_SPECS = {
    "the gated delta rule": GATED_DELTA,
    "Kimi Delta Attention": replace(GATED_DELTA, recurrence=Recurrence.KDA),
    "Mamba2": replace(GATED_DELTA, recurrence=Recurrence.SSD),
    "short convolutions": replace(GATED_DELTA, recurrence=Recurrence.CONV, num_key_heads=0, key_dim=0),
}


def examine(device: torch.device) -> Iterator[Finding]:
    """Examine everything about drafting on the device, topic by topic."""
    yield from _machine(device)
    yield from _packages()
    yield from _graphs(device)
    yield from _fa3_providers()
    try_plug_ins()
    yield from _backends(device)
    yield from _chips()
    yield from _plug_ins()


def validate_metadata(
    backend: AttentionBackend, device: torch.device, *, rounds: int, every: int, page_size: int | None = None
) -> Finding:
    """Draft with a backend and validate every N-th round: see `spec_decode.tools.metadata_validator`."""

    def validate() -> str:
        return validate_rounds(backend, device, rounds=rounds, every=every, page_size=page_size).describe()

    return _tried("metadata", backend.name, validate)


def _machine(device: torch.device) -> Iterator[Finding]:
    where = environment(device)
    for subject in ("device", "driver", "cuda", "torch", "triton", "python", "platform", "commit"):
        detail = getattr(where, subject)
        unknown = detail is None or str(detail).startswith("unknown")
        if subject == "commit" and where.stated:
            detail = f"{detail}, {where.stated}"
        yield Finding("machine", subject, FindingStatus.ABSENT if unknown else FindingStatus.OK, str(detail or "none"))
    yield Finding("machine", "contract", FindingStatus.OK, ".".join(map(str, CONTRACT_VERSION)))
    if device.type == "cuda":
        yield _tried("machine", "compute capability", lambda: "{}.{}".format(*torch.cuda.get_device_capability(device)))
        yield _tried("machine", "our kernels", lambda: evidence_for(device))
        yield _tried("machine", "memory", lambda: _memory(device))


def _memory(device: torch.device) -> str:
    free, total = torch.cuda.mem_get_info(device)
    return f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"


def _packages() -> Iterator[Finding]:
    for name in _PACKAGES:
        try:
            yield Finding("packages", name, FindingStatus.OK, version(name) + _tested(name, version(name)))
        except PackageNotFoundError:
            yield Finding("packages", name, FindingStatus.ABSENT, "not installed" + _tested(name, None))


def _tested(name: str, found: str | None) -> str:
    """Describe the tested releases of a package, and say so if the installed one lies outside their range."""
    if name not in TESTED:
        return ""
    releases = TESTED[name]
    oldest, newest = releases[0], releases[-1]
    kinds = ("oldest", "every commit", "newest") if len(releases) > 1 else ("GPU reports",)
    versions = f"tested: {', '.join(f'{each} ({kind})' for each, kind in zip(releases, kinds, strict=True))}"
    if found is None or _release(oldest) <= _release(found) <= _release(newest):
        return f"; {versions}"
    return f"; untested, {'newer' if _release(found) > _release(newest) else 'older'} than those tested; {versions}"


def _release(text: str) -> tuple[int, ...]:
    """Parse a version: (2, 13, 0) for 2.13.0+cpu."""
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])


def _graphs(device: torch.device) -> Iterator[Finding]:
    yield _tried("graphs", "capture and replay", lambda: _captures(device))
    if reason := loop_unsupported_reason(device):
        yield Finding("graphs", "device loop", FindingStatus.ABSENT, reason)
    else:
        yield _tried("graphs", "device loop", lambda: _loops(device))


def _captures(device: torch.device) -> str:
    runtime, cell = runtime_for(device), torch.zeros(1, dtype=torch.int64, device=device)
    before = runtime.memory_used()
    graph = runtime.capture(lambda: cell.add_(1))
    used = runtime.memory_used() - before
    if (untouched := int(cell)) != 0:
        raise RuntimeError(f"a capture must not execute, but it set a cell of 0 to {untouched}")
    graph.replay()
    graph.replay()
    if (found := int(cell)) != 2:
        raise RuntimeError(f"two replays of an addition must give 2, got {found}")
    return f"works ({_kind(device)}), a capture of one node takes {used / 2**20:.1f} MiB"


def _loops(device: torch.device) -> str:
    """Count to 3 in a loop that the device ends."""
    runtime = runtime_for(device)
    cell, continue_flag = (torch.full((1,), start, dtype=torch.int32, device=device) for start in (0, 1))

    def body() -> None:
        cell.add_(1)
        continue_flag.copy_(cell < 3)

    before = runtime.memory_used()
    graph = runtime.capture_loop(body, body, continue_flag, 2)
    used = runtime.memory_used() - before
    graph.replay()
    if (found := int(cell)) != 3:
        raise RuntimeError(f"a loop must end at 3, but it ended at {found}")
    return f"works ({_kind(device)}), a capture of its body takes {used / 2**20:.1f} MiB"


def _kind(device: torch.device) -> str:
    return "a CUDA graph" if device.type == "cuda" else "emulated on the CPU"


def _fa3_providers() -> Iterator[Finding]:
    """Report every package that can provide FlashAttention-3, including the one in use."""
    requested = os.environ.get(PROVIDER_VARIABLE)
    chosen = False
    for kind in PROVIDERS:
        finding = partial(Finding, "FlashAttention-3", kind.name)
        try:
            provider = load_provider(kind)
        except BrokenProvider as error:
            yield finding(FindingStatus.FAILED, str(error))
            continue
        if provider is None:
            yield finding(FindingStatus.ABSENT, f"no module {kind.module}: {kind.remedy}")
            continue
        in_use = requested == kind.name if requested else not chosen
        chosen = chosen or in_use
        yield finding(FindingStatus.OK, f"{provider.version}{', in use' if in_use else ''}")


def _backends(device: torch.device) -> Iterator[Finding]:
    for name in (*registry.names(), *registry.state_names()):
        try:
            backend = registry.load(name)
        except MissingPackage as error:
            yield Finding("backends", name, FindingStatus.ABSENT, error.missing)
        except BrokenBackend as error:
            yield Finding("backends", name, FindingStatus.FAILED, str(error))
        else:
            yield _backend_finding(name, backend, device)


def _backend_finding(name: str, backend: Any, device: torch.device) -> Finding:
    specs: Mapping[str, object] = _STATE_SPECS if isinstance(backend, StateBackend) else _SPECS
    try:
        verdicts = {use: backend.supports(spec, device) for use, spec in specs.items()}
        served = [use for use, verdict in verdicts.items() if isinstance(verdict, Accepted)]
        reasons = {why for verdict in verdicts.values() if not isinstance(verdict, Accepted) for why in verdict.reasons}
        detail = f"{backend.version}: {'; '.join(served) or '; '.join(sorted(reasons))}"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plug-in can fail in any way when queried
        return Finding("backends", name, FindingStatus.FAILED, f"{type(error).__name__}: {error}")
    return Finding("backends", name, FindingStatus.OK if served else FindingStatus.REFUSED, detail)


def _chips() -> Iterator[Finding]:
    """Report for each chip what is known of our kernels there, and which of the backends that load here serve it."""
    for chip in CHIPS:
        served = ", ".join(name for name, claims in _loaded_claims().items() if _serves(claims, chip))
        detail = f"our Triton kernels: {chip.evidence}; served by {served}"
        yield Finding("chips", f"{chip.target} ({chip.cards})", FindingStatus.OK, detail)


def _loaded_claims() -> dict[str, Capabilities | StateCapabilities]:
    found: dict[str, Capabilities | StateCapabilities] = {}
    for name in (*registry.names(), *registry.state_names()):
        with suppress(BrokenBackend):
            found[name] = registry.load(name).capabilities
    return found


def _serves(claims: Capabilities | StateCapabilities, chip: Chip) -> bool:
    """Return whether the claims include the chip."""
    return not capability_reasons(claims.compute_capability, claims.one_major_version, chip.capability)


def _plug_ins() -> Iterator[Finding]:
    for plug_in in registry.plug_ins():
        if registry.registered_here(plug_in.name):
            detail = f"{plug_in.package}: unused, a call registered another backend under its name"
            yield Finding("plug-ins", plug_in.name, FindingStatus.REFUSED, detail)
        else:
            yield _tried("plug-ins", plug_in.name, partial(_class_of, plug_in))


def _class_of(plug_in: PlugIn) -> str:
    backend = registry.get(plug_in.name)
    return f"{plug_in.package}: {type(backend).__module__}.{type(backend).__qualname__} {backend.version}"


def _tried(topic: str, subject: str, ask: Callable[[], str]) -> Finding:
    try:
        return Finding(topic, subject, FindingStatus.OK, ask())
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a diagnosis must survive everything that it examines
        return Finding(topic, subject, FindingStatus.FAILED, f"{type(error).__name__}: {error}")
