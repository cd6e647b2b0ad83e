"""The builder for gated delta rules, such as Qwen3-Next's and Qwen3.5's."""

from __future__ import annotations

from typing import Any

from attn_backends import AttentionBackend
from engine_kits.hash_recurrence import Slots
from engine_kits.vllm.gated_delta import run_drafted
from engine_kits.vllm.recurrent_states import recurrent_backend_over


def backend() -> type[AttentionBackend]:
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend

    return recurrent_backend_over(GDNAttentionBackend, "gated_delta", kernels, __name__)


def kernels(metadata: Any, tokens: list[int], slots: Slots) -> None:
    """Stand in for the kernels of `QwenGatedDeltaNetAttention._forward_core`."""
    m = metadata
    other = tokens if m.spec_sequence_masks is None else run_drafted(m, tokens, slots)
    held, starts = m.non_spec_state_indices_tensor, m.non_spec_query_start_loc
    if m.num_prefills:
        slots.slide(held, starts, other, m.has_initial_state)
        if m.spec_sequence_masks is None and m.num_decodes:
            slots.run(held[: m.num_decodes], starts, other)
        prompts = other[m.num_decode_tokens :] if m.spec_sequence_masks is None else other
        slots.run(m.prefill_state_indices, m.prefill_query_start_loc, prompts, m.prefill_has_initial_state)
    elif m.num_decodes:
        slots.slide(held[: len(starts) - 1], starts, other)
        slots.run(held[: m.num_decodes], starts, other)
