"""The backend under test on a device, and the plainest spec that it accepts there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch

from attn_backends import AttentionBackend, Rejected
from builders import AdvanceLevel, AttentionKind, AttentionSpec
from spec_decode.testing.outcome import Unsupported, expect

PAGE_SIZE = 16

PLAIN_SPECS: dict[AttentionKind, list[dict[str, Any]]] = {
    AttentionKind.MHA: [
        {"num_q_heads": heads, "num_kv_heads": 2, "page_size": page, "head_dim": dim}
        for heads, page, dim in product((4, 2), (PAGE_SIZE, 64, 1), (64, 128))
    ],
    AttentionKind.MLA: [
        {"num_q_heads": heads, "num_kv_heads": 1, "page_size": page, "sliding_window": window, **dims}
        for dims, heads, page, window in product(
            (
                {"head_dim": 80, "value_dim": 64},
                {"head_dim": 128},
                {"head_dim": 512},
                {"head_dim": 576, "value_dim": 512},
            ),
            (4, 64),
            (PAGE_SIZE, 64, 1),
            (None, 40),
        )
    ],
}
"""Fields of the specs to try for each kind, plainest first."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The backend under test and its device."""

    backend: AttentionBackend
    device: torch.device
    requested_name: str = ""
    """The name it was requested by; empty if the backend itself was passed."""
    engine: str = ""
    """The engine, with its version, that this builder belongs to; empty for a backend of this library."""
    no_attention: str = ""
    """Why no attention uses the builder's metadata, so only fields are checked; empty if a forward does."""
    families: tuple[str, ...] = ()
    """The families that can judge it; empty for all."""

    def base_spec(self) -> AttentionSpec:
        """Return the plainest spec that the backend accepts: grouped and in fp32 if supported.

        Raises Unsupported, with every reason given, if it rejects all of them; CheckFailure for a rejection without a
        reason.
        """
        dtypes = sorted(self.backend.capabilities.dtypes, key=lambda dtype: -torch.finfo(dtype).bits)
        reasons: list[str] = []
        for kind, dtype in product(self.backend.capabilities.kinds, dtypes):
            for spec in plain_specs(kind, dtype):
                answer = self.backend.supports(spec, self.device)
                if not isinstance(answer, Rejected):
                    return spec
                reasons += _reasons_of(answer)
        raise Unsupported("; ".join(dict.fromkeys(reasons)) or "claims no dtype, or no kind of attention")

    def require_supported(self, spec: AttentionSpec) -> None:
        """Raise Unsupported, with the backend's own reasons, unless it accepts the spec; CheckFailure if it rejects it
        without any."""
        answer = self.backend.supports(spec, self.device)
        if not isinstance(answer, Rejected):
            return
        raise Unsupported("; ".join(_reasons_of(answer)))

    def require_in_graph_advance(self, spec: AttentionSpec) -> None:
        """Raise Unsupported unless the backend accepts the spec and claims to advance it inside a graph."""
        self.require_supported(spec)
        support = self.backend.builder.advance_support(spec, self.device)
        if support.level is not AdvanceLevel.IN_GRAPH:
            raise Unsupported(f"advance is {support.level.name}: {support.reason}")


@cache
def plain_specs(kind: AttentionKind, dtype: torch.dtype) -> tuple[AttentionSpec, ...]:
    """Return the specs to try for a kind, plainest first."""
    return tuple(AttentionSpec(kind=kind, dtype=dtype, **fields) for fields in PLAIN_SPECS[kind])


def _reasons_of(answer: Rejected) -> tuple[str, ...]:
    reasons = answer.reasons
    expect(
        bool(reasons) and all(reason.strip() for reason in reasons),
        contract="a rejection has a reason, and none is blank",
        expected="Rejected(reasons)",
        got=answer,
    )
    return reasons
