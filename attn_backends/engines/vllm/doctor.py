"""`attn-backends doctor` for vLLM: its version, and which backends and quantizations it could use."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

from attn_backends.engines.plug_in import EnginePlugIn, why_not_loaded
from attn_backends.engines.vllm import ENTRY_POINT_GROUP, NAMES, refused_variable
from attn_backends.engines.vllm.compat import unsupported_reason
from attn_backends.engines.vllm.device_plan import NO_FLASHINFER
from attn_backends.engines.vllm.names import PLAIN, ROUNDED
from builders.devices import FP8_CAPABILITY

_PREFIX = "ATTN_BACKENDS_"
"""Prefix of this library's backends; the others are vLLM's with a builder of this library."""


def _flashinfer() -> str:
    return "" if find_spec("flashinfer") else NO_FLASHINFER


def _linears(lowest: tuple[int, int]) -> Callable[[], str]:
    """Return a function that says why linear layers do not load here. lowest: compute capability that they need."""

    def ask() -> str:
        try:
            from attn_backends.kernels.linear import linear_op as linear_op
        except ImportError as error:
            return str(error)
        found = torch.cuda.get_device_capability() if torch.cuda.is_available() else lowest
        return "" if found >= lowest else f"this GPU has compute capability {found}; use one of at least {lowest}"

    return ask


_LINEARS = {PLAIN: _linears((8, 0)), ROUNDED: _linears(FP8_CAPABILITY)}


def _chosen_by(name: str) -> str:
    if name in _LINEARS:
        return 'a target selects it with --quantization, a draft with "quantization" in --speculative-config'
    return 'a draft selects it with "attention_backend" in --speculative-config'


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
        **_LINEARS,
    },
    chosen_by=_chosen_by,
    refused=refused_variable,
).examine
