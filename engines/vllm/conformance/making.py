"""What the subjects share: a class of the contract over a builder of vLLM, and the KV groups that they are made for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from attn_backends import AttentionBackend, Capabilities, Feature, Sizes
from builders import CONTRACT_VERSION, AttentionKind, AttentionSpec, GraphSupport
from engines.vllm.conformance.builder import EngineBuilder
from engines.vllm.conformance.config import LAYER, config_of

HEADS = Capabilities(
    devices=("cpu",),
    dtypes=(torch.bfloat16,),
    head_dims=Sizes(minimum=64, maximum=256),
    page_sizes=Sizes(minimum=16, multiple_of=16),
    features=frozenset({Feature.GQA, Feature.SLIDING_WINDOW}),
)
"""What heads of keys and values are tried with."""
LATENT = replace(
    HEADS,
    head_dims=Sizes(minimum=64, maximum=512, power_of_two=True),
    kv_dtypes=(torch.float8_e4m3fn,),
    features=frozenset({Feature.GQA, Feature.SLIDING_WINDOW, Feature.SINKS}),
    kinds=(AttentionKind.MLA,),
)
"""The same of latents."""
_PLAIN = AttentionSpec(num_q_heads=4, num_kv_heads=1, head_dim=512, page_size=64, sliding_window=128)


def heads_group(spec: AttentionSpec) -> Any:
    """vLLM's KV group of keys and values."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    sizes = {"num_kv_heads": spec.num_kv_heads, "head_size": spec.head_dim}
    return FullAttentionSpec(block_size=spec.page_size, dtype=spec.dtype, **sizes)


def index_group(spec: AttentionSpec) -> Any:
    """vLLM's KV group of an indexer's keys: 128 bytes and a scale a token."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    return MLAAttentionSpec(block_size=spec.page_size, num_kv_heads=1, head_size=132, dtype=torch.uint8)


def builder_class(
    theirs: Any,
    group: Callable[[AttentionSpec], Any],
    step_fields: tuple[str, ...],
    *,
    prepare: Callable[[Any, AttentionSpec], None] = lambda config, spec: None,
    scratch: tuple[str, ...] = (),
) -> type[EngineBuilder]:
    """The contract over `theirs`, made for the KV group of a spec and for a config that `prepare` has completed."""
    from vllm.config import set_current_vllm_config

    @cache
    def prepared(spec: AttentionSpec) -> Any:
        prepare(config := config_of(spec), spec)
        return config

    def make(spec: AttentionSpec, device: torch.device, block_table_width: int) -> Any:
        wide = {"block_table_width": block_table_width} if theirs.requires_block_table_width else {}
        with set_current_vllm_config(config := prepared(spec)):
            return theirs(group(spec), [LAYER], config, device, **wide)

    with set_current_vllm_config(prepared(_PLAIN)):
        claimed = theirs.get_cudagraph_support(prepared(_PLAIN), group(_PLAIN))
    body = {
        "make": staticmethod(make),
        "graph_support": _GRAPH_SUPPORT[claimed.name],
        "step_fields": step_fields,
        "scratch": scratch,
    }
    return type(theirs.__name__, (EngineBuilder,), body)


def backend_class(
    module: str, builder: type[EngineBuilder], capabilities: Capabilities, attends: type[AttentionBackend]
) -> type[AttentionBackend]:
    """The backend that is checked: the builder, what it is tried with, and what attends by its metadata.

    module: that of the subject, beside which its known failures are.
    """
    facts = {"name": builder.__name__, "builder": builder, "capabilities": capabilities}
    # It is asked for whatever the contract says now.
    return type(builder.__name__, (attends,), {"__module__": module, "contract_version": CONTRACT_VERSION, **facts})


_GRAPH_SUPPORT = {
    "NEVER": GraphSupport.NEVER,
    "UNIFORM_SINGLE_TOKEN_DECODE": GraphSupport.SINGLE_TOKEN_DECODE,
    "UNIFORM_BATCH": GraphSupport.UNIFORM_BATCH,
    "ALWAYS": GraphSupport.ALWAYS,
}
"""By the name of vLLM's level."""
