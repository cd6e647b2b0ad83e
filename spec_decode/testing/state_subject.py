"""The backend of recurrent state under test on a device, and the plainest spec that it accepts there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from attn_backends import Rejected, StateBackend
from builders import Recurrence, StateSpec
from spec_decode.testing.outcome import Unsupported

QUERY = 4
"""Query tokens of a verification: 1 + K."""
RESERVE = 3
"""Steps of a recurrent draft after its first."""
JOURNALS = (QUERY + RESERVE + 1, 16, 32, 64)
"""The first folds in almost every step."""
_DIMS = ((16, 8), (16, 16), (32, 32), (64, 64), (128, 128), (128, 64))


@dataclass(frozen=True, slots=True)
class StateSubject:
    """The backend under test and its device."""

    backend: StateBackend
    device: torch.device
    requested_name: str = ""
    """The name it was requested by; empty if the backend itself was passed."""
    families: tuple[str, ...] = ()
    """As in Subject."""
    engine: str = ""
    """Always empty: no engine's builder of recurrent state is wrapped."""

    def base_spec(self) -> StateSpec:
        """Return the plainest spec that the backend accepts: grouped, in fp32 and with a short journal if supported.

        Raises Unsupported, with every reason given, if it rejects all of them.
        """
        able = self.backend.capabilities
        reasons: dict[str, None] = {}
        dtypes = sorted(able.dtypes, key=lambda dtype: -torch.finfo(dtype).bits)
        widths = (4, able.conv_widths.smallest)
        choices = product(able.recurrences, dtypes, able.state_dtypes, _DIMS, (4, 2), widths, JOURNALS)
        for recurrence, dtype, state_dtype, (key_dim, value_dim), heads, width, journal in choices:
            keys: Any = _keys(recurrence, 2, key_dim)
            spec = StateSpec(
                num_value_heads=heads,
                value_dim=value_dim,
                journal=journal,
                recurrence=recurrence,
                conv_width=width,
                dtype=dtype,
                state_dtype=state_dtype,
                **keys,
            )
            answer = self.backend.supports(spec, self.device)
            if not isinstance(answer, Rejected):
                return spec
            reasons |= dict.fromkeys(answer.reasons)
        raise Unsupported("; ".join(reasons))

    def require_supported(self, spec: StateSpec) -> None:
        """Raise Unsupported, with the backend's own reasons, unless it accepts the spec."""
        answer = self.backend.supports(spec, self.device)
        if isinstance(answer, Rejected):
            raise Unsupported("; ".join(answer.reasons))


def varied(spec: StateSpec, **changes: Any) -> StateSpec:
    """Return the spec with these fields changed; another recurrence brings keys along, or leaves them out."""
    fields = {name: getattr(spec, name) for name in ("recurrence", "num_key_heads", "key_dim")} | changes
    keys = _keys(fields["recurrence"], fields["num_key_heads"] or 2, fields["key_dim"] or spec.value_dim)
    return replace(spec, **{**changes, **keys})


def _keys(recurrence: Recurrence, heads: int, dim: int) -> dict[str, int]:
    return (
        {"num_key_heads": heads, "key_dim": dim} if recurrence.rule.has_matrix else {"num_key_heads": 0, "key_dim": 0}
    )
