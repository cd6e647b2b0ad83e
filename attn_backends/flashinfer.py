"""FlashInfer on Hopper: its paged decode on tensor cores, on CUDA cores and with XQA, and its prefill to extend."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from attn_backends.base import AttentionBackend, Sinks, check_forward_inputs
from attn_backends.capabilities import Capabilities, Feature, FusedWrite, Sizes
from attn_backends.fa3_providers import package_version
from attn_backends.fused_writes import FusedRopeWrite
from attn_backends.kv_cache import KVCache
from attn_backends.merged_trees import merge_tree, merged_tree_reasons
from builders import AttentionSpec
from builders.devices import on_device
from builders.errors import require
from builders.flashinfer.builder import (
    CudaCoreBuilder,
    FlashInferBuilder,
    FlashInferMetadata,
    TensorCoreBuilder,
    XqaBuilder,
)
from builders.flashinfer.wrappers import Kernel

_ALIGNMENT = 16
"""Bytes per load of the kernels."""
_CUDA_CORE_GROUPS = (1, 2, 3, 4, 8)
"""Group sizes that FlashInfer compiles the kernel for."""
_XQA_GROUPS = 32
"""The largest group size that XQA was seen to compile for; for 128 a static assertion of mha.cu fails."""


def _version() -> str:
    """Return the package's version without importing it, which starts CUDA. Raises ImportError if it is absent."""
    found = find_spec("flashinfer")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("No module named 'flashinfer'", name="flashinfer")
    return package_version("flashinfer-python", kernels=Path(found.origin).parent, pattern="_build_meta.py")


def _lowest_score(version: str) -> float | None:
    """Before 0.7.2.post1, decode on CUDA cores returns 0 if every score is as low as -46,341 (seen on an H100). Kernels
    of unknown version are assumed to be as old."""
    match = re.match(r"\S+ (\d\S*)", version)
    release = tuple(int(part) for part in re.findall(r"\d+", match[1])[:4]) if match else ()
    return -46_341.0 if release < (0, 7, 2, 1) else None


class FlashInfer(FusedRopeWrite, AttentionBackend):
    """Decodes with the kernel that serves the spec best and extends with the prefill wrapper, which also attends to a
    tree's prefix: its output and base-2 lse are merged with the tree's own attention.

    run() must not overlap its prologue with the previous kernel (PDL): both kernels read their plan before they wait,
    and the previous kernel can be the one that writes it.
    """

    name = "flashinfer"
    version = _version()
    contract_version = (1, 2)
    builder = FlashInferBuilder
    capabilities = Capabilities(
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        head_dims=Sizes(minimum=64, maximum=256, power_of_two=True),
        page_sizes=Sizes(),
        features=frozenset({Feature.GQA, Feature.SLIDING_WINDOW, Feature.SOFT_CAP, Feature.NON_CAUSAL, Feature.TREE}),
        kv_dtypes=(torch.float8_e4m3fn,),
        fused_writes=frozenset({FusedWrite.ROPE}),
        lowest_score=_lowest_score(version),
    )

    def unsupported_reasons(self, spec: AttentionSpec, device: torch.device) -> list[str]:
        """Add the error if the package cannot be imported, which is tried for CUDA devices only."""
        reasons = merged_tree_reasons(spec)
        if device.type != "cuda":
            return reasons
        try:
            import_module("flashinfer.decode")
        except Exception as error:  # a broken build can raise anything; its message becomes the reason
            reasons.append(f"flashinfer is installed but cannot be imported: {type(error).__name__}: {error}")
        return reasons

    def compiled_for(self, spec: AttentionSpec) -> Hashable:
        """Name what nvcc compiles a module for."""
        return spec.dtype, spec.cache_dtype, spec.head_dim, spec.sliding_window is not None, spec.soft_cap is not None

    def forward(
        self, query: Tensor, cache: KVCache, metadata: FlashInferMetadata, *, spec: AttentionSpec, sinks: Sinks = None
    ) -> Tensor:
        """See AttentionBackend. Raises BatchError for keys and values with strides that the kernel cannot read."""
        check_forward_inputs(query, cache, metadata, spec, sinks)
        unit = spec.head_dim if metadata.launch.kernel is Kernel.XQA else _ALIGNMENT // cache.key.element_size()
        require(
            cache.key.stride() == cache.value.stride() and not any(s % unit for s in cache.key.stride()[:3]),
            f"FlashInfer's {metadata.launch.kernel.value} kernel reads keys and values with the same strides, each a "
            f"multiple of {unit} elements, got {cache.key.stride()} and {cache.value.stride()}; it would read wrong "
            "numbers. Take keys and values from one tensor, or call allocate_kv.",
        )
        if metadata.launch.kernel is Kernel.XQA:
            return _xqa(query, cache, metadata, spec)
        # Without `out`, the prefill wrapper would fill a new output with zeros first.
        out = query.new_empty(query.shape)
        own, attended = query[: metadata.launch.num_tokens], out[: metadata.launch.num_tokens]
        scales = _scales(cache)
        run = partial(
            metadata.launch.wrapper.run, own, (cache.key, cache.value), out=attended, enable_pdl=False, **scales
        )
        if metadata.tree_masks is None:
            run()
        else:
            _, lse = run(return_lse=True)
            merge_tree(attended, lse, own, cache, metadata, spec, sinks, lse_base_2=True)
        return out


def _scales(cache: KVCache) -> dict[str, float]:
    """Return the arguments for the scales of an e4m3 cache; a value scale of 1 is left out, for it costs a kernel."""
    if cache.scales is None:
        return {}
    scales = {"k_scale": cache.scales.key_floats[0], "v_scale": cache.scales.value_floats[0]}
    return {name: scale for name, scale in scales.items() if scale != 1.0}


class FlashInferTensorCores(FlashInfer):
    """Decodes with the FA2 kernel."""

    name = "flashinfer_tensor_cores"
    builder = TensorCoreBuilder


class FlashInferCudaCores(FlashInfer):
    """Decodes on CUDA cores."""

    name = "flashinfer_cuda_cores"
    builder = CudaCoreBuilder

    def unsupported_reasons(self, spec: AttentionSpec, device: torch.device) -> list[str]:
        reasons = super().unsupported_reasons(spec, device)
        if spec.group_size not in _CUDA_CORE_GROUPS:
            reasons.append(f"query heads per KV head must be one of {_CUDA_CORE_GROUPS}, got {spec.group_size}")
        return reasons


class FlashInferXqa(FlashInfer):
    """Decodes with XQA, which splits by the block table's width and needs no plan."""

    name = "flashinfer_xqa"
    builder = XqaBuilder
    capabilities = replace(
        FlashInfer.capabilities,
        page_sizes=Sizes(minimum=16, maximum=128, power_of_two=True),
        features=FlashInfer.capabilities.features - {Feature.SOFT_CAP},
        kv_dtypes=(),
        compute_capability=(9, 0),
        # Between a CTA's warp groups and between a request's CTAs: mergeAndSaveOutTile in mha.cu of csrc/xqa.
        rounds_partials=True,
        # Each row's maximum starts at safeInitRowMax of csrc/xqa: -1e5 of score times log2(e).
        lowest_score=-1e5 / math.log2(math.e),
    )

    def unsupported_reasons(self, spec: AttentionSpec, device: torch.device) -> list[str]:
        reasons = super().unsupported_reasons(spec, device)
        if spec.group_size > _XQA_GROUPS:
            reasons.append(f"query heads per KV head must be at most {_XQA_GROUPS}, got {spec.group_size}")
        return reasons

    def compiled_for(self, spec: AttentionSpec) -> Hashable:
        """Name what nvcc compiles XQA's module for, and that of the other kernels."""
        return super().compiled_for(spec), spec.page_size, spec.group_size


def _xqa(query: Tensor, cache: KVCache, metadata: FlashInferMetadata, spec: AttentionSpec) -> Tensor:
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache  # type: ignore[import-not-found]

    query = query.contiguous()  # XQA takes no strides for it
    with on_device(query.device):  # it launches on the current device
        out: Tensor = trtllm_batch_decode_with_kv_cache(
            query=query,
            kv_cache=(cache.key, cache.value),
            workspace_buffer=metadata.launch.workspace,
            block_tables=metadata.block_table,
            seq_lens=metadata.seq_lens,
            max_seq_len=metadata.max_seq_len,
            bmm1_scale=spec.softmax_scale,
            bmm2_scale=1.0,
            window_left=spec.window_left,
            kv_layout="NHD",
            backend="xqa",
            enable_pdl=False,
        )
    # Without tokens, XQA multiplies 0 by the inverse of the weights' sum.
    return out.masked_fill_((metadata.seq_lens == 0)[:, None, None], 0.0)
