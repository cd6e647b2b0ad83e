"""Whether the installed vLLM is one that the adapters support."""

from __future__ import annotations

from importlib import import_module

SUPPORTED = "0.33"
"""The vLLM minor whose classes `attn_backends.engines.vllm.v0_33` extends."""
_HOOKS = {
    "vllm.v1.attention.backend:AttentionMetadataBuilder.update_draft_decode_metadata": "in-graph updates",
    "vllm.v1.attention.backend:AttentionBackend.validate_configuration": "a backend's rejection reasons",
    "vllm.v1.attention.backend:CommonAttentionMetadata.__dataclass_fields__": "the batch for builders",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum.register": "free backend names",
    "vllm.v1.kv_cache_interface:create_kv_cache_views": "the packed KV cache",
}
"""What the adapters depend on, and what it provides."""


class UnsupportedVllm(ImportError):
    """The adapters were not written for the installed vLLM. vLLM shows the message as a backend's reason."""


def unsupported_reason(found: str) -> str:
    """Return why the adapters do not support this vLLM version; empty if they do."""
    if found.split(".")[:2] == SUPPORTED.split("."):
        return ""
    return (
        f"attn-backends' adapters are for vLLM {SUPPORTED}, got {found}; its classes and cache may differ, so none was "
        f"loaded. Install vllm=={SUPPORTED}.*, or choose one of vLLM's own backends."
    )


def require_supported() -> None:
    """Raise UnsupportedVllm unless vLLM is of the supported minor and has every hook that the adapters use."""
    import vllm

    found = str(getattr(vllm, "__version__", "unknown"))
    if reason := unsupported_reason(found):
        raise UnsupportedVllm(reason)
    if missing := [f"{path} ({what})" for path, what in _HOOKS.items() if not _exists(path)]:
        raise UnsupportedVllm(
            f"attn-backends' adapters build on hooks of vLLM {SUPPORTED}, this {found} lacks {', '.join(missing)}; its "
            "drafts would not be updated, so none was loaded. Install a released vLLM."
        )


def _exists(path: str) -> bool:
    module, _, names = path.partition(":")
    try:
        found = import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return False
    return True
