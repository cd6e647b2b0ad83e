"""The builder for FlashMLA's sparse latents as in vllm#54369 and vllm#54790: with an update that does nothing."""

from __future__ import annotations

from attn_backends import AttentionBackend
from engine_kits.vllm.flashmla_sparse import backend_over
from engine_kits.vllm.making import with_empty_update


def backend() -> type[AttentionBackend]:
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseMetadataBuilder

    return backend_over(with_empty_update(FlashMLASparseMetadataBuilder, "FlashMLASparseWithAnEmptyUpdate"), __name__)
