"""The package `flashinfer` for machines without a GPU: wrappers that attend, in torch, by the plan in their workspace.

What is ours around FlashInfer's kernels runs over it as it is: a plan of other lengths gives other numbers, or what the
real kernel would end in as a RuntimeError. Nothing here knows a batch but through the tensors that the kernels read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

from attn_backends import AttentionBackend, registry
from tests.flashinfer_stand_in.wrappers import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from tests.flashinfer_stand_in.xqa import trtllm_batch_decode_with_kv_cache

NAMES = ("flashinfer", "flashinfer_tensor_cores", "flashinfer_cuda_cores", "flashinfer_xqa")
_IMPORT_IT = ("builders.flashinfer.builder", "builders.flashinfer.wrappers", "attn_backends.flashinfer")


@contextmanager
def installed(partials: int = 1 << 13) -> Iterator[None]:
    """`import flashinfer` gives the stand-in.

    partials: the least bytes of a builder's workspaces: far below what FlashInfer recommends, so that what a batch
    needs is computed.
    """
    package, decode = ModuleType("flashinfer"), ModuleType("flashinfer.decode")
    vars(package).update(
        __spec__=ModuleSpec("flashinfer", None, origin=__file__),
        decode=decode,
        BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
    )
    vars(decode).update(trtllm_batch_decode_with_kv_cache=trtllm_batch_decode_with_kv_cache)
    with _backends_of_their_own(), _modules({"flashinfer": package, "flashinfer.decode": decode}):
        vars(import_module("builders.flashinfer.wrappers"))["_PARTIALS"] = partials
        yield


@contextmanager
def absent() -> Iterator[None]:
    """`import flashinfer` fails, wherever it is installed, and no backend over it has been made."""
    with _backends_of_their_own(), _modules({"flashinfer": None}):
        yield


def backend(name: str) -> AttentionBackend:
    """A backend over the stand-in, which runs on the CPU."""
    module, _, attribute = registry._BUILT_IN[name].factory.partition(":")
    base = getattr(import_module(module), attribute)
    capabilities = replace(base.capabilities, devices=("cpu",))
    made: AttentionBackend = type(base.__name__, (base,), {"capabilities": capabilities})()
    return made


@contextmanager
def _backends_of_their_own() -> Iterator[None]:
    """No backend over the package has been made, and none that is made now stays."""
    loaded = _forget()
    try:
        yield
    finally:
        _forget()
        registry._loaded.update(loaded)


def _forget() -> dict[str, AttentionBackend]:
    return {name: registry._loaded.pop(name) for name in NAMES if name in registry._loaded}


@contextmanager
def _modules(stand_ins: dict[str, ModuleType | None]) -> Iterator[None]:
    """These modules in the package's place, and every module that imports it made anew; as before afterwards."""
    before = _take_away()
    sys.modules.update(stand_ins)  # type: ignore[arg-type]  # None is how an import is made to fail
    try:
        yield
    finally:
        _take_away()
        sys.modules.update(before)
        for name in before.keys() & set(_IMPORT_IT):
            parent, _, child = name.rpartition(".")
            setattr(sys.modules[parent], child, before[name])


def _take_away() -> dict[str, ModuleType]:
    affected = [name for name in sys.modules if name.partition(".")[0] == "flashinfer" or name in _IMPORT_IT]
    taken = {name: sys.modules.pop(name) for name in affected}
    for name in _IMPORT_IT:
        parent, _, child = name.rpartition(".")
        vars(sys.modules[parent]).pop(child, None)
    return taken
