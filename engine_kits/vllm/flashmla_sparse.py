"""The builder for FlashMLA's sparse latents, as in DeepSeek-V3.2."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from attn_backends import AttentionBackend, Sizes
from builders import AttentionSpec
from engine_kits.engine_cache import NoAttention
from engine_kits.subjects import DENSE_LATENT, backend_class
from engine_kits.vllm.config import LAYER
from engine_kits.vllm.making import builder_class, latents_group

_PAGE = 64
_PAGES = replace(DENSE_LATENT, page_sizes=Sizes(minimum=_PAGE, maximum=_PAGE))
_FIELDS = ("seq_lens", "slot_mapping")


def backend() -> type[AttentionBackend]:
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseMetadataBuilder

    return backend_over(FlashMLASparseMetadataBuilder, __name__)


def backend_over(engine_builder: Any, module: str) -> type[AttentionBackend]:
    """Return the backend over vLLM's builder or a copy. module: as in `backend_class`."""
    builder = builder_class(engine_builder, latents_group, _FIELDS, prepare=_prepare)
    return backend_class(module, builder, _PAGES, NoAttention)


def _prepare(config: Any, spec: AttentionSpec) -> None:
    """Set up a model with latents and an indexer, and a layer without prefill."""
    dims = {
        "kv_lora_rank": spec.out_dim,
        "qk_rope_head_dim": spec.head_dim - spec.out_dim,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "q_lora_rank": None,
    }
    config.model_config.hf_text_config.update({**dims, "index_topk": 2048})
    config.model_config.model_arch_config.head_size = 576
    config.compilation_config.static_forward_context[LAYER] = SimpleNamespace(prefill_backend=None)
