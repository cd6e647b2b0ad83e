"""The builder for Mamba2's state space duality, such as NemotronH's and Granite 4's."""

from __future__ import annotations

from typing import Any

from attn_backends import AttentionBackend
from engine_kits.hash_recurrence import Slots
from engine_kits.vllm.recurrent_states import recurrent_backend_over


def backend() -> type[AttentionBackend]:
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend

    return recurrent_backend_over(Mamba2AttentionBackend, "ssd", kernels, __name__)


def kernels(metadata: Any, tokens: list[int], slots: Slots) -> None:
    """Stand in for the kernels of `MambaMixer2.conv_ssm_forward`."""
    slide(metadata, tokens, slots)
    m = metadata
    if m.num_prefills:
        prompts = tokens[m.num_decode_tokens :]
        known = m.has_initial_states_p if m.prep_initial_states else m.has_initial_states_p.new_zeros(m.num_prefills)
        slots.run(m.state_indices_tensor_p, m.query_start_loc_p, prompts, known)
    if m.num_decodes:
        decodes = tokens[: m.num_decode_tokens]
        slots.run_drafts(m.state_indices_tensor_d, m.num_accepted_tokens, m.query_start_loc_d, decodes)


def slide(metadata: Any, tokens: list[int], slots: Slots) -> None:
    """Stand in for the convolutions, which a short convolution has too."""
    m = metadata
    if m.num_prefills:
        prompts = tokens[m.num_decode_tokens :]
        slots.slide(m.state_indices_tensor_p, m.query_start_loc_p, prompts, m.has_initial_states_p)
    if m.num_decodes:
        decodes = tokens[: m.num_decode_tokens]
        slots.slide_drafts(m.state_indices_tensor_d[:, 0], m.num_accepted_tokens, m.query_start_loc_d, decodes)
