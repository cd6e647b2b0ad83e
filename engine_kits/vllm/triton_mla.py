"""The builder for vLLM's dense latent attention in Triton."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from attn_backends import AttentionBackend
from builders import AttentionSpec
from engine_kits.subjects import DENSE_LATENT, backend_class
from engine_kits.vllm.config import LAYER
from engine_kits.vllm.forwards import Latents
from engine_kits.vllm.making import builder_class, latents_group


def backend() -> type[AttentionBackend]:
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLAMetadataBuilder

    fields = ("slot_mapping", "decode_seq_lens")
    builder = builder_class(TritonMLAMetadataBuilder, latents_group, fields, prepare=_prepare)
    return backend_class(__name__, builder, DENSE_LATENT, Latents)


def _prepare(config: Any, spec: AttentionSpec) -> None:
    """Add the layer whose dims and prefill the builder reads."""
    rotary = spec.head_dim - spec.out_dim
    dims = {"kv_lora_rank": spec.out_dim, "qk_rope_head_dim": rotary, "qk_nope_head_dim": 128, "v_head_dim": 128}
    # vLLM supports two head sizes for a model; the layer's, which matter here, can be smaller.
    config.model_config.model_arch_config.head_size = 576
    layer = SimpleNamespace(**dims, q_lora_rank=None, prefill_backend=MagicMock(name="prefill_backend"))
    config.compilation_config.static_forward_context[LAYER] = layer
