"""What `attn-backends doctor` says of vLLM, without importing it: its version, and which backends it could use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec

import attn_backends
from engines.vllm import ENTRY_POINT_GROUP, NAMES
from engines.vllm.version import unsupported_reason
from spec_decode.tools.doctor import Finding, FindingStatus

_TOPIC = "engines"


def examine() -> Iterator[Finding]:
    """vLLM, and where it is of the supported minor, how it finds the plug-in and each backend of it."""
    try:
        found = version("vllm")
    except PackageNotFoundError:
        yield Finding(_TOPIC, "vllm", FindingStatus.ABSENT, "not installed: pip install 'attn-backends[vllm]'")
        return
    if reason := unsupported_reason(found):
        yield Finding(_TOPIC, "vllm", FindingStatus.REFUSED, reason)
        return
    yield Finding(_TOPIC, "vllm", FindingStatus.OK, found)
    yield _finding("its plug-ins", _why_not_found(), "vLLM finds attn_backends among them")
    for name in NAMES:
        yield _finding(name, _NEEDS[name](), 'a draft takes it by "attention_backend" in --speculative-config')


def _finding(subject: str, reason: str, detail: str) -> Finding:
    status = FindingStatus.REFUSED if reason else FindingStatus.OK
    return Finding(_TOPIC, subject, status, reason or detail)


def _why_not_found() -> str:
    allowed = os.environ.get("VLLM_PLUGINS")
    if not any(point.value == "engines.vllm:register" for point in entry_points(group=ENTRY_POINT_GROUP)):
        return f"no package declares attn_backends in {ENTRY_POINT_GROUP}: install attn-backends again"
    if allowed is not None and "attn_backends" not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed} leaves attn_backends out: add it, or unset the variable"
    return ""


def _flashinfer() -> str:
    return "" if find_spec("flashinfer") else "needs FlashInfer: pip install 'attn-backends[flashinfer]'"


def _ours(name: str) -> Callable[[], str]:
    """Why one of our backends does not load, or nothing."""

    def ask() -> str:
        try:
            attn_backends.get(name)
        except attn_backends.BackendError as error:
            return str(error)
        return ""

    return ask


_NEEDS = {
    "FLASHINFER_IN_GRAPH": _flashinfer,
    "ATTN_BACKENDS_TRITON_PAGED": _ours("triton_paged"),
    "ATTN_BACKENDS_FLASH_ATTN3": _ours("flash_attn3"),
    "ATTN_BACKENDS_TRITON_MLA": _ours("triton_mla"),
}
