"""Shared parts of the subjects: a contract class over a vLLM builder, and the KV groups that builders are made for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from builders import AttentionSpec, GraphSupport
from engine_kits.vllm.builder import EngineBuilder
from engine_kits.vllm.config import LAYER, config_of

_PLAIN = AttentionSpec(num_q_heads=4, num_kv_heads=1, head_dim=512, page_size=64, sliding_window=128)


def heads_group(spec: AttentionSpec) -> Any:
    """Return vLLM's KV group for keys and values."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    sizes = {"num_kv_heads": spec.num_kv_heads, "head_size": spec.head_dim}
    return FullAttentionSpec(block_size=spec.page_size, dtype=spec.dtype, **sizes)


def index_group(spec: AttentionSpec) -> Any:
    """Return vLLM's KV group for an indexer's keys: 128 bytes and a scale per token."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    return MLAAttentionSpec(block_size=spec.page_size, num_kv_heads=1, head_size=132, dtype=torch.uint8)


def latents_group(spec: AttentionSpec) -> Any:
    """Return vLLM's KV group for dense latents."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    return MLAAttentionSpec(block_size=spec.page_size, num_kv_heads=1, head_size=spec.head_dim, dtype=spec.dtype)


def builder_class(
    engine_builder: Any,
    group: Callable[[AttentionSpec], Any],
    step_fields: tuple[str, ...],
    *,
    prepare: Callable[[Any, AttentionSpec], None] = lambda config, spec: None,
    scratch: tuple[str, ...] = (),
) -> type[EngineBuilder]:
    """Return the contract class over a vLLM builder, for a spec's KV group and a config that `prepare` completes."""
    from vllm.config import set_current_vllm_config

    @cache
    def prepared(spec: AttentionSpec) -> Any:
        prepare(config := config_of(spec), spec)
        return config

    def make(spec: AttentionSpec, device: torch.device, block_table_width: int) -> Any:
        options = {"block_table_width": block_table_width} if engine_builder.requires_block_table_width else {}
        with set_current_vllm_config(config := prepared(spec)):
            return engine_builder(group(spec), [LAYER], config, device, **options)

    with set_current_vllm_config(prepared(_PLAIN)):
        claimed = engine_builder.get_cudagraph_support(prepared(_PLAIN), group(_PLAIN))
    body = {
        "make": staticmethod(make),
        "graph_support": GRAPH_SUPPORT[claimed.name],
        "step_fields": step_fields,
        "scratch": scratch,
    }
    return type(engine_builder.__name__, (EngineBuilder,), body)


def with_empty_update(engine_builder: Any, name: str) -> Any:
    """Copy vLLM's builder as one that claims to update in place, but does nothing."""
    hook = {"update_draft_decode_metadata": lambda self, metadata: None}
    return type(name, (engine_builder,), {"supports_draft_decode_metadata_update": True, **hook})


GRAPH_SUPPORT = {
    "NEVER": GraphSupport.NEVER,
    "UNIFORM_SINGLE_TOKEN_DECODE": GraphSupport.SINGLE_TOKEN_DECODE,
    "UNIFORM_BATCH": GraphSupport.UNIFORM_BATCH,
    "ALWAYS": GraphSupport.ALWAYS,
}
"""By the name of vLLM's level."""
