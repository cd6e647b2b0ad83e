"""`attn-backends doctor` for vLLM: its version, and which backends it could use."""

from __future__ import annotations

from importlib.util import find_spec

from attn_backends.engines.plug_in import EnginePlugIn, why_not_loaded
from attn_backends.engines.vllm import ENTRY_POINT_GROUP, NAMES, refused_variable
from attn_backends.engines.vllm.compat import unsupported_reason
from attn_backends.engines.vllm.device_plan import NO_FLASHINFER

_PREFIX = "ATTN_BACKENDS_"
"""Prefix of this library's backends; the others are vLLM's with a builder of this library."""


def _flashinfer() -> str:
    return "" if find_spec("flashinfer") else NO_FLASHINFER


examine = EnginePlugIn(
    package="vllm",
    title="vLLM",
    unsupported=unsupported_reason,
    group=ENTRY_POINT_GROUP,
    variable="VLLM_PLUGINS",
    needs={
        "FLASHINFER_IN_GRAPH": _flashinfer,
        **{name: why_not_loaded(name.removeprefix(_PREFIX).lower()) for name in NAMES if name.startswith(_PREFIX)},
        "FLASHMLA_SPARSE_IN_GRAPH": lambda: "",
    },
    chosen_by='"attention_backend" in --speculative-config',
    refused=refused_variable,
).examine
