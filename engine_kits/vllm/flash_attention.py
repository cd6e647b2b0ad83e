"""FlashAttention's builder."""

from __future__ import annotations

from typing import Any

import torch

from attn_backends import AttentionBackend
from engine_kits.subjects import HEADS, backend_class
from engine_kits.vllm.forwards import PackedHeads
from engine_kits.vllm.making import builder_class, heads_group

_FIELDS = ("seq_lens", "slot_mapping", "scheduler_metadata")


def backend() -> type[AttentionBackend]:
    import vllm.v1.attention.backends.flash_attn as engine_module

    vars(engine_module)["get_scheduler_metadata"] = _schedule
    builder = builder_class(engine_module.FlashAttentionMetadataBuilder, heads_group, _FIELDS)
    return backend_class(__name__, builder, HEADS, PackedHeads)


def _schedule(*, cache_seqlens: torch.Tensor, **_: Any) -> torch.Tensor:
    """Replaces FlashAttention's own op and, like its plan, depends on every length."""
    return torch.cat([cache_seqlens.new_zeros(1), ((cache_seqlens + 127) // 128).repeat(4)])
