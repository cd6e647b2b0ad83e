"""`attn-backends doctor` for SGLang: its version, and which backends it could use."""

from __future__ import annotations

from attn_backends.engines.plug_in import EnginePlugIn, why_not_loaded
from attn_backends.engines.sglang import ENTRY_POINT_GROUP, NAMES
from attn_backends.engines.sglang.version import release_reason


def _allowed(value: str) -> list[str] | None:
    """Parse the variable as SGLang does: empty allows all."""
    return [name.strip() for name in value.split(",")] if value else None


examine = EnginePlugIn(
    package="sglang",
    title="SGLang",
    unsupported=release_reason,
    group=ENTRY_POINT_GROUP,
    variable="SGLANG_PLUGINS",
    needs={name: why_not_loaded(backend) for name, (backend, _) in NAMES.items()},
    chosen_by=lambda name: "a draft selects it with --speculative-draft-attention-backend",
    allowed=_allowed,
).examine
