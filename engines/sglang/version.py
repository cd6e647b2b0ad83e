"""Whether the SGLang that is here is one that the adapters were written for."""

from __future__ import annotations

import inspect
from importlib import import_module, metadata

SUPPORTED = "0.5.23"
"""The release of SGLang that `engines.sglang.v0_5_23` was written for; its draft workers change with each."""
_LOOK_UP = ("self", "backend_name", "backend_map", "error_template", "stamps_children")
"""Parameters of the method that is hooked."""


class UnsupportedSglang(ImportError):
    """The SGLang that is installed is none that the adapters were written for."""


def release_reason(found: str) -> str:
    """Why the adapters are not for an SGLang of this version, or nothing."""
    if found == SUPPORTED:
        return ""
    return (
        f"attn-backends' adapters are for SGLang {SUPPORTED}, got {found}; its draft workers may mean something "
        f"else, so no backend was registered. Install sglang=={SUPPORTED}, or choose one of SGLang's own."
    )


def unsupported_reason() -> str:
    """Why the adapters are not for the SGLang that is here, or nothing."""
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
    """Raise UnsupportedSglang unless SGLang is of the supported release."""
    if reason := unsupported_reason():
        raise UnsupportedSglang(reason)
