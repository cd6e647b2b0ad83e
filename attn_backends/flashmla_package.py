"""FlashMLA, from its own package or from vLLM's wheel: the module with its kernels, and its version."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from attn_backends.fa3_providers import package_version

_MODULES = ("flash_mla.flash_mla_interface", "vllm.third_party.flashmla.flash_mla_interface")
SPARSE = {"flash_mla_sparse_fwd": {"attn_sink"}, "flash_mla_with_kvcache": {"indices", "attn_sink"}}
"""Entry points called with lists of slots, each with the arguments that older releases lack."""
DENSE = {"FlashMLASchedMeta": {"have_initialized"}, "flash_mla_with_kvcache": {"block_table", "cache_seqlens"}}
"""The same for whole prefixes. Older releases schedule in a separate call, which takes lengths."""


def load_flashmla(entries: Mapping[str, set[str]]) -> Any:
    """Import FlashMLA's module: the standalone package if it is installed, else the copy in vLLM's wheel.

    Raises ImportError if neither is installed, and RuntimeError if the one found does not load or lacks one of the
    entries or an argument of it; the other is then not tried.
    """
    for name in _MODULES:
        package = name.partition(".")[0]
        try:
            import_module(package)
            module = import_module(name)
        except Exception as error:  # a broken build can raise anything; its message becomes the reason
            if isinstance(error, ModuleNotFoundError) and error.name == package:
                continue
            raise RuntimeError(f"{name} is installed but cannot be used: {type(error).__name__}: {error}") from error
        for entry, needed in entries.items():
            found = set(signature(getattr(module, entry)).parameters) if hasattr(module, entry) else set()
            if missing := sorted(needed - found):
                raise RuntimeError(f"{name} is too old: its {entry} must accept {' and '.join(missing)}")
        return module
    raise ImportError("FlashMLA is not installed, as flash_mla or in vllm")


def flashmla_version(module: Any) -> str:
    """Return package and version of the module that `load_flashmla` found."""
    folder = Path(str(module.__file__)).parent
    if module.__name__.startswith("vllm."):
        return package_version("vllm", kernels=folder.parents[1], pattern="_flashmla_C*.so")
    return package_version("tokenspeed-flashmla", "flash-mla", kernels=folder, pattern="cuda*.so")
