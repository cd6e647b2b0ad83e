"""What `attn-backends doctor` says of vLLM, without importing it: its version, and which backends it could use."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from engines.findings import TOPIC, finding, why_not_found, why_not_loaded
from engines.vllm import ENTRY_POINT_GROUP, NAMES
from engines.vllm.version import unsupported_reason
from spec_decode.tools.doctor import Finding, FindingStatus


def examine() -> Iterator[Finding]:
    """vLLM, and where it is of the supported minor, how it finds the plug-in and each backend of it."""
    try:
        found = version("vllm")
    except PackageNotFoundError:
        yield Finding(TOPIC, "vllm", FindingStatus.ABSENT, "not installed: pip install 'attn-backends[vllm]'")
        return
    if reason := unsupported_reason(found):
        yield Finding(TOPIC, "vllm", FindingStatus.REFUSED, reason)
        return
    yield Finding(TOPIC, "vllm", FindingStatus.OK, found)
    lost = why_not_found(ENTRY_POINT_GROUP, "engines.vllm:register", "VLLM_PLUGINS")
    yield finding("its plug-ins", lost, "vLLM finds attn_backends among them")
    for name in NAMES:
        yield finding(name, _NEEDS[name](), 'it loads; a draft takes it by "attention_backend" in --speculative-config')


def _flashinfer() -> str:
    return "" if find_spec("flashinfer") else "needs FlashInfer: pip install 'attn-backends[flashinfer]'"


_NEEDS = {
    "FLASHINFER_IN_GRAPH": _flashinfer,
    "ATTN_BACKENDS_TRITON_PAGED": why_not_loaded("triton_paged"),
    "ATTN_BACKENDS_FLASH_ATTN3": why_not_loaded("flash_attn3"),
    "ATTN_BACKENDS_TRITON_MLA": why_not_loaded("triton_mla"),
}
