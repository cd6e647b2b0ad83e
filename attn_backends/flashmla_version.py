"""The FlashMLA that was found, for provenance."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from attn_backends.fa3_providers import package_version


def flashmla_version(module: ModuleType) -> str:
    """Return package and version of the module that `load_flashmla` found."""
    folder = Path(str(module.__file__)).parent
    if module.__name__.startswith("vllm."):
        return package_version("vllm", kernels=folder.parents[1], pattern="_flashmla_C*.so")
    return package_version("tokenspeed-flashmla", "flash-mla", kernels=folder, pattern="cuda*.so")
