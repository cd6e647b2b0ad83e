"""The package `flashinfer` for machines without a GPU: wrappers that attend, in torch, by the plan in their workspace.

What is ours around FlashInfer's kernels runs over it as it is: a plan of other lengths gives other numbers, or what the
real kernel would end in as a RuntimeError. Nothing here knows a batch but through the tensors that the kernels read.
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
    """`import flashinfer` gives the stand-in.

    partials, plan: the least bytes of a builder's workspaces: far below what FlashInfer recommends, so that what a
    batch needs is computed.
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
        vars(import_module("builders.flashinfer.wrappers")).update(_PARTIALS=partials, _PLAN=plan)
        yield


@contextmanager
def absent() -> Iterator[None]:
    """`import flashinfer` fails, wherever it is installed, and no backend over it has been made."""
    with unloaded(*_IMPORT_IT, package="flashinfer"):
        sys.modules["flashinfer"] = None  # type: ignore[assignment]  # is how an import is made to fail
        yield


def backend(name: str) -> AttentionBackend:
    """A backend over the stand-in, which runs on the CPU."""
    module, _, attribute = registry._BUILT_IN[name].factory.partition(":")
    return on_the_cpu(getattr(import_module(module), attribute))
