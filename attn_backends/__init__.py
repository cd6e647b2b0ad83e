"""Attention backends, the capabilities they declare, and how one is chosen."""

from pathlib import Path
from typing import TYPE_CHECKING

import builders

# A project's own builders.py or builders/ comes first on the path, and would fail far from here.
if Path(builders.__file__).parent != (_ours := Path(__file__).parents[1] / "builders"):
    raise ImportError(
        f"`builders` must be the package {_ours}, got {builders.__file__}, which hides it. Rename the latter, or start "
        "Python where it is not on the path.",
        name="builders",
        path=builders.__file__,
    )

from attn_backends.base import AttentionBackend, check_forward_inputs, check_write_inputs
from attn_backends.capabilities import Accepted, Capabilities, CapabilitiesError, Feature, FusedWrite, Rejected, Sizes
from attn_backends.fused_writes import FusedLatentWrite, FusedRopeWrite
from attn_backends.kv_cache import FP8_DS_MLA, CacheLayout, KVCache, cache_layout
from attn_backends.kv_scales import KVScales
from attn_backends.registry import (
    BackendError,
    BrokenBackend,
    DuplicateBackend,
    MissingPackage,
    UnknownBackend,
    explain,
    get,
    get_state,
    names,
    register,
    state_names,
    unregister,
)
from attn_backends.selection import NoBackend, Selection, select
from attn_backends.state import StateBackend, StateInputs, check_state_inputs
from attn_backends.state_cache import StateCache, StateLengths, StepPlan
from attn_backends.state_capabilities import StateCapabilities, StateFeature

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
    "KVScales",
    "MissingPackage",
    "NoBackend",
    "Rejected",
    "Selection",
    "Sizes",
    "StateBackend",
    "StateCache",
    "StateCapabilities",
    "StateFeature",
    "StateInputs",
    "StateLengths",
    "StepPlan",
    "UnknownBackend",
    "cache_layout",
    "check_forward_inputs",
    "check_state_inputs",
    "check_write_inputs",
    "explain",
    "get",
    "get_state",
    "names",
    "register",
    "select",
    "state_names",
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
