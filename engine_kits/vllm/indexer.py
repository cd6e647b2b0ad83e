"""The builder of DeepSeek-V3.2's indexer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attn_backends import AttentionBackend, Sizes
from engine_kits.engine_cache import NoAttention
from engine_kits.subjects import LATENT, backend_class
from engine_kits.vllm.making import builder_class, index_group

_FIELDS = ("seq_lens", "slot_mapping", "decode_seq_lens")


def backend() -> type[AttentionBackend]:
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder

    return backend_over(DeepseekV32IndexerMetadataBuilder, __name__)


def backend_over(engine_builder: Any, module: str) -> type[AttentionBackend]:
    """Return the backend over vLLM's builder or a copy. module: as in `backend_class`."""
    # DeepGEMM makes the schedule; without it nothing writes it.
    builder = builder_class(engine_builder, index_group, _FIELDS, scratch=("decode_schedule_metadata",))
    pages = replace(LATENT, page_sizes=Sizes(minimum=64, multiple_of=64))
    return backend_class(module, builder, pages, NoAttention)
