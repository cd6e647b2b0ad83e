"""The builder of DeepSeek-V3.2's indexer as in vllm#54369: with an update that does nothing."""

from __future__ import annotations

from attn_backends import AttentionBackend
from engine_kits.vllm.indexer import backend_over
from engine_kits.vllm.making import with_empty_update


def backend() -> type[AttentionBackend]:
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder

    engine_builder = with_empty_update(DeepseekV32IndexerMetadataBuilder, "DeepseekV32IndexerWithAnEmptyUpdate")
    return backend_over(engine_builder, __name__)
