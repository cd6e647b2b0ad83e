"""The draft backend of SGLang's Triton attention."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from attn_backends import AttentionBackend
from builders import HostLengths
from engine_kits.sglang.attention import attend, from_its_address, listed
from engine_kits.sglang.builder import DraftAttention, PlannedSteps
from engine_kits.sglang.stand_in import STEPS
from engine_kits.subjects import HEADS, backend_class


class TritonMultiStepDraftBackend(PlannedSteps):
    host_lengths = HostLengths.NONE

    @staticmethod
    def make(runner: Any) -> Any:
        from sglang.srt.layers.attention.triton_backend import TritonMultiStepDraftBackend

        steps = TritonMultiStepDraftBackend(runner, topk=1, speculative_num_steps=STEPS)
        for step in steps.attn_backends:
            step.decode_attention_fwd = _decode_attention
        return steps

    @staticmethod
    def kernel_inputs(metadata: Any, batch: Any, live: int) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for rail in ("kv", "window_kv"):
            ends, slots = (getattr(metadata, f"{rail}_{what}") for what in ("indptr", "indices"))
            if slots is not None:
                found |= {f"{rail}_indptr": ends[: live + 1], f"{rail}_indices": from_its_address(slots)[: ends[live]]}
        return found

    @staticmethod
    def slots(metadata: Any, batch: Any) -> list[Tensor]:
        if batch.window:
            return listed(metadata.window_kv_indptr, metadata.window_kv_indices)
        return listed(metadata.kv_indptr, metadata.kv_indices)


def backend() -> type[AttentionBackend]:
    return backend_class(__name__, TritonMultiStepDraftBackend, HEADS, DraftAttention)


_SCALE = 4
"""The scale's position in `rest`, after logits, lse, the splits and their maximum."""


def _decode_attention(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    o: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    *rest: Any,
    **_: Any,
) -> None:
    """Replaces SGLang's kernel, which takes minutes in the interpreter. rest: buffers of partial results, the scale."""
    sm_scale = rest[_SCALE]
    key, value = (buffer.flatten(0, -3) for buffer in (k_buffer, v_buffer))
    attend(o, q, key, value, partial(listed, kv_indptr, kv_indices), (kv_indptr, kv_indices), sm_scale)
