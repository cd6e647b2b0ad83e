"""The builder of vLLM's Triton attention."""

from __future__ import annotations

from attn_backends import AttentionBackend
from engine_kits.subjects import HEADS, backend_class
from engine_kits.vllm.forwards import PackedHeads
from engine_kits.vllm.making import builder_class, heads_group


def backend() -> type[AttentionBackend]:
    from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder

    fields = ("seq_lens", "slot_mapping")
    builder = builder_class(TritonAttentionMetadataBuilder, heads_group, fields, scratch=("softmax_segm",))
    return backend_class(__name__, builder, HEADS, PackedHeads)
