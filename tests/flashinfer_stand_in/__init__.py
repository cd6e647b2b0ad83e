"""The package `flashinfer` for machines without a GPU: wrappers that attend, in torch, by the plan in their workspace.

Our code around FlashInfer's kernels runs over it unchanged: a plan for other lengths gives other numbers, or a
RuntimeError where the real kernel would crash. Nothing here knows a batch except through the tensors that the kernels
read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

from attn_backends import AttentionBackend, registry
from tests.backends_over_stand_ins import on_the_cpu, unloaded
from tests.flashinfer_stand_in.wrappers import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from tests.flashinfer_stand_in.xqa import trtllm_batch_decode_with_kv_cache

NAMES = ("flashinfer", "flashinfer_tensor_cores", "flashinfer_cuda_cores", "flashinfer_xqa")
_IMPORT_IT = ("builders.flashinfer.builder", "builders.flashinfer.wrappers", "attn_backends.flashinfer")


@contextmanager
def installed(partials: int = 1 << 13, plan: int = 1 << 12) -> Iterator[None]:
    """Make `import flashinfer` return the stand-in.

    partials, plan: minimum bytes of a builder's workspaces, far below FlashInfer's recommendation, so that the builder
    must compute a batch's needs.
    """
    package, decode = ModuleType("flashinfer"), ModuleType("flashinfer.decode")
    vars(package).update(
        __spec__=ModuleSpec("flashinfer", None, origin=__file__),
        decode=decode,
        BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
    )
    vars(decode).update(trtllm_batch_decode_with_kv_cache=trtllm_batch_decode_with_kv_cache)
    with unloaded(*_IMPORT_IT, package="flashinfer"):
        sys.modules.update({"flashinfer": package, "flashinfer.decode": decode})
        vars(import_module("builders.flashinfer.wrappers")).update(_PARTIAL_BYTES=partials, _PLAN_BYTES=plan)
        yield


@contextmanager
def absent() -> Iterator[None]:
    """Make `import flashinfer` fail even if it is installed, with no backend over it loaded."""
    with unloaded(*_IMPORT_IT, package="flashinfer"):
        sys.modules["flashinfer"] = None  # makes the import fail
        yield


def backend(name: str) -> AttentionBackend:
    """Return a backend over the stand-in, which runs on the CPU."""
    module, _, attribute = registry._BUILT_IN[name].factory.partition(":")
    return on_the_cpu(getattr(import_module(module), attribute))
