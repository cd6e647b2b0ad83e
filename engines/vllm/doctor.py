"""What `attn-backends doctor` says of vLLM: its version, and which backends it could use."""

from __future__ import annotations

from importlib.util import find_spec

from engines.findings import EnginePlugIn, why_not_loaded
from engines.vllm import ENTRY_POINT_GROUP, refused_variable
from engines.vllm.device_plan import NO_FLASHINFER
from engines.vllm.version import unsupported_reason


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
        "ATTN_BACKENDS_TRITON_PAGED": why_not_loaded("triton_paged"),
        "ATTN_BACKENDS_FLASH_ATTN3": why_not_loaded("flash_attn3"),
        "ATTN_BACKENDS_TRITON_MLA": why_not_loaded("triton_mla"),
        "ATTN_BACKENDS_FLASH_ATTN3_MLA": why_not_loaded("flash_attn3_mla"),
        "ATTN_BACKENDS_FLASHMLA": why_not_loaded("flashmla"),
        "FLASHMLA_SPARSE_IN_GRAPH": lambda: "",
    },
    chosen_by='"attention_backend" in --speculative-config',
    refused=refused_variable,
).examine
