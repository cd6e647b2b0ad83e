"""The backend of recurrent state under test on a device, and the plainest spec that it accepts there."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from attn_backends import Rejected, StateBackend
from builders import StateSpec
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
            fields: dict[str, Any] = {"dtype": dtype, "state_dtype": state_dtype, "conv_width": width}
            spec = StateSpec(
                num_key_heads=2,
                num_value_heads=heads,
                key_dim=key_dim,
                value_dim=value_dim,
                journal=journal,
                recurrence=recurrence,
                **fields,
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
