"""Choosing a backend for a spec: the result lists every rejection with its reasons; there is no silent fallback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar, overload

import torch

from attn_backends import registry
from attn_backends.base import AttentionBackend
from attn_backends.capabilities import Rejected
from attn_backends.state import StateBackend
from builders import AttentionSpec, StateSpec

B_co = TypeVar("B_co", bound=registry.Backend, covariant=True)


class NoBackend(registry.BackendError):
    """No backend serves the spec; the message lists each one's reasons."""


@dataclass(frozen=True, slots=True)
class Selection(Generic[B_co]):
    """The chosen backend, and why each one tried before it was rejected."""

    backend: B_co
    rejected: dict[str, Rejected] = field(default_factory=dict)


DEFAULT_ORDER = ("triton_paged", "sparse_swa_mla", "triton_mla", "torch_reference")
"""Fastest first; other registered backends are used only on request."""
DEFAULT_STATE_ORDER = ("triton_state", "torch_state")
"""The same for recurrent state."""


@overload
def select(spec: AttentionSpec, device: torch.device, prefer: Sequence[str] = ()) -> Selection[AttentionBackend]: ...
@overload
def select(spec: StateSpec, device: torch.device, prefer: Sequence[str] = ()) -> Selection[StateBackend]: ...
def select(
    spec: AttentionSpec | StateSpec, device: torch.device, prefer: Sequence[str] = ()
) -> Selection[registry.Backend]:
    """Return the first backend in `prefer` that serves the spec; without `prefer`, the first in the default order.

    Backends outside `prefer` are not tried. Raises NoBackend with every reason, or UnknownBackend for an unknown name.
    """
    if isinstance(prefer, str):
        raise registry.UnknownBackend(f"prefer must be a list of backend names, got {prefer!r}. Pass [{prefer!r}].")
    rejected: dict[str, Rejected] = {}
    for name in prefer or (DEFAULT_STATE_ORDER if isinstance(spec, StateSpec) else DEFAULT_ORDER):
        answer = registry.explain(name, spec, device)
        if not isinstance(answer, Rejected):
            return Selection(registry.load(name), rejected)
        rejected[name] = answer
    reasons = "; ".join(f"{name}: {', '.join(answer.reasons)}" for name, answer in rejected.items())
    raise NoBackend(
        f"no backend supports [{spec.describe()}] on {device.type}: {reasons}. Name another backend or none, or ask "
        "for what one of these serves."
    )
