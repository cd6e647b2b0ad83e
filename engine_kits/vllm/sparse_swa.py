"""The builder for DeepSeek-V4's sparse sliding window."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from attn_backends import AttentionBackend, Feature
from builders import AttentionSpec
from engine_kits.subjects import LATENT, backend_class
from engine_kits.vllm.forwards import WindowLists
from engine_kits.vllm.making import builder_class

_FIELDS = ("seq_lens", "slot_mapping", "is_valid_token", "decode_swa_indices", "decode_swa_lens")
_SCRATCH = ("flashinfer_", "query_start_loc_cpu")


def backend() -> type[AttentionBackend]:
    import vllm.v1.attention.backends.mla.sparse_swa as engine_module

    # FlashMLA's tile schedule, which its kernel fills and uses internally.
    vars(engine_module)["get_mla_metadata"] = lambda *args, **kwargs: (SimpleNamespace(), None)
    builder = builder_class(engine_module.DeepseekSparseSWAMetadataBuilder, _group, _FIELDS, scratch=_SCRATCH)
    windows = replace(LATENT, required=frozenset({Feature.SLIDING_WINDOW}))
    return backend_class(__name__, builder, windows, WindowLists)


def _group(spec: AttentionSpec) -> Any:
    from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

    return SlidingWindowMLASpec(
        block_size=spec.page_size,
        num_kv_heads=1,
        head_size=584,
        dtype=torch.uint8,
        # A window for the call that asks a group for its claims before it has one.
        sliding_window=spec.sliding_window or 128,
        cache_dtype_str="fp8_ds_mla",
        model_version="deepseek_v4",
    )
