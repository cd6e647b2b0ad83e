"""What `attn-backends doctor` says of SGLang, without importing it: its version, and which backends it could use."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from engines.findings import TOPIC, finding, why_not_found, why_not_loaded
from engines.sglang import ENTRY_POINT_GROUP, NAMES
from engines.sglang.version import release_reason
from spec_decode.tools.doctor import Finding, FindingStatus


def examine() -> Iterator[Finding]:
    """SGLang, and where it is the supported release, how it finds the plug-in and each backend of it."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        yield Finding(TOPIC, "sglang", FindingStatus.ABSENT, "not installed: pip install 'attn-backends[sglang]'")
        return
    if reason := release_reason(found):
        yield Finding(TOPIC, "sglang", FindingStatus.REFUSED, reason)
        return
    yield Finding(TOPIC, "sglang", FindingStatus.OK, found)
    lost = why_not_found(ENTRY_POINT_GROUP, "engines.sglang:register", "SGLANG_PLUGINS")
    yield finding("its plug-ins", lost, "SGLang finds attn_backends among them")
    for name, (ours, _) in NAMES.items():
        loads = "it loads; a draft takes it by --speculative-draft-attention-backend"
        yield finding(name, why_not_loaded(ours)(), loads)
