"""The builder for the tail cache of GLM-5.3-Flash's pooled indexer."""

from __future__ import annotations

from dataclasses import replace

from attn_backends import AttentionBackend, Sizes
from engine_kits.engine_cache import NoAttention
from engine_kits.subjects import LATENT, backend_class
from engine_kits.vllm.making import builder_class, index_group


def backend() -> type[AttentionBackend]:
    from vllm.v1.attention.backends.mla.indexer import KpoolTailMetadataBuilder

    builder = builder_class(KpoolTailMetadataBuilder, index_group, ("seq_lens", "slot_mapping", "positions"))
    return backend_class(__name__, builder, replace(LATENT, page_sizes=Sizes(minimum=4)), NoAttention)
