"""The builder for short convolutions, such as LFM2's."""

from __future__ import annotations

from attn_backends import AttentionBackend
from engine_kits.vllm.mamba.mamba2 import slide
from engine_kits.vllm.recurrent_states import recurrent_backend_over


def backend() -> type[AttentionBackend]:
    from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionBackend

    return recurrent_backend_over(ShortConvAttentionBackend, "conv", slide, __name__, stateless=True)
