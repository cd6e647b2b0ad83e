"""Whether the installed SGLang is one that the adapters support."""

from __future__ import annotations

import inspect
from importlib import import_module, metadata

SUPPORTED = "0.5.23"
"""The SGLang release that the folder `v0_5_23` was written for; its draft workers change with each release."""
_LOOK_UP = ("self", "backend_name", "backend_map", "error_template", "stamps_children")
"""Parameters of the hooked method."""


class UnsupportedSglang(ImportError):
    """The adapters were not written for the installed SGLang."""


def release_reason(found: str) -> str:
    """Return why the adapters do not support this SGLang version; empty if they do."""
    if found == SUPPORTED:
        return ""
    return (
        f"attn-backends' adapters are for SGLang {SUPPORTED}, got {found}; its draft workers may differ, so no backend "
        f"was registered. Install sglang=={SUPPORTED}, or choose one of SGLang's own."
    )


def unsupported_reason() -> str:
    """Return why the adapters do not support the installed SGLang; empty if they do."""
    try:
        found = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        found = "none"
    if reason := release_reason(found):
        return reason
    factory = import_module("sglang.srt.speculative.draft_utils").DraftBackendFactory
    found_parameters = tuple(inspect.signature(factory._create_backend).parameters)
    if found_parameters != _LOOK_UP:
        return (
            f"attn-backends hooks DraftBackendFactory._create_backend of SGLang {SUPPORTED}, whose parameters are "
            f"{', '.join(_LOOK_UP)}; got {', '.join(found_parameters)}, so no backend was registered. Install a "
            "released SGLang."
        )
    return ""


def require_supported() -> None:
    """Raise UnsupportedSglang unless the supported SGLang release is installed."""
    if reason := unsupported_reason():
        raise UnsupportedSglang(reason)
