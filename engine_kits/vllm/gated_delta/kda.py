"""The builder for Kimi's delta attention, whose own Triton kernels prepare its metadata."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from attn_backends import AttentionBackend
from engine_kits.hash_recurrence import Slots
from engine_kits.launches import OnTheDevice
from engine_kits.vllm.gated_delta import run_drafted
from engine_kits.vllm.recurrent_states import recurrent_backend_over


def backend() -> type[AttentionBackend]:
    from vllm.models.kimi_k3.nvidia import kda_metadata

    stage = kda_metadata.stage_spec_decode_metadata
    kda_metadata.stage_spec_decode_metadata = partial(_on_the_device, getattr(stage, "args", (stage,))[0])
    return recurrent_backend_over(kda_metadata.KimiK3KDAAttentionBackend, "kda", kernels, __name__)


def _on_the_device(stage: Callable[..., None], **tensors: Any) -> None:
    """Launch vLLM's own kernel, which asserts that its tensors are on the device."""
    with OnTheDevice():
        stage(**tensors)


def kernels(metadata: Any, tokens: list[int], slots: Slots) -> None:
    """Stand in for the kernels of `KimiK3DeltaAttention._forward`."""
    m = metadata
    other = run_drafted(m, tokens, slots) if m.num_spec_decodes else tokens
    held = m.non_spec_state_indices_tensor
    if m.num_prefills:
        for kernel in (slots.slide, slots.run):
            kernel(held, m.non_spec_query_start_loc, other, m.has_initial_state)
    elif m.num_decodes:
        # One token a row: the packed kernels read no offsets.
        each = held.new_tensor(range(len(other) + 1))
        for kernel in (slots.slide, slots.run):
            kernel(held[: len(other)], each, other)
