"""Attention backends, the capabilities they declare, and how one is chosen."""

from typing import TYPE_CHECKING

from attn_backends.base import AttentionBackend, check_forward_inputs, check_write_inputs
from attn_backends.capabilities import Accepted, Capabilities, CapabilitiesError, Feature, FusedWrite, Rejected, Sizes
from attn_backends.fused_writes import FusedLatentWrite, FusedRopeWrite
from attn_backends.kv_cache import FP8_DS_MLA, CacheLayout, KVCache, cache_layout
from attn_backends.merged_trees import merge_tree, merged_tree_reasons
from attn_backends.registry import (
    BackendError,
    BrokenBackend,
    DuplicateBackend,
    MissingPackage,
    UnknownBackend,
    explain,
    get,
    names,
    register,
    unregister,
)
from attn_backends.selection import NoBackend, Selection, select

__all__ = [
    "FP8_DS_MLA",
    "Accepted",
    "AttentionBackend",
    "BackendError",
    "BrokenBackend",
    "CacheLayout",
    "Capabilities",
    "CapabilitiesError",
    "DuplicateBackend",
    "Feature",
    "FusedLatentWrite",
    "FusedRopeWrite",
    "FusedWrite",
    "KVCache",
    "MissingPackage",
    "NoBackend",
    "Rejected",
    "Selection",
    "Sizes",
    "UnknownBackend",
    "cache_layout",
    "check_forward_inputs",
    "check_write_inputs",
    "explain",
    "get",
    "merge_tree",
    "merged_tree_reasons",
    "names",
    "register",
    "select",
    "unregister",
]

if TYPE_CHECKING:
    __version__: str
else:  # a type checker would accept every name

    def __getattr__(name: str) -> str:
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("attn-backends")
        except PackageNotFoundError:  # sources that are not installed
            return "0+unknown"
