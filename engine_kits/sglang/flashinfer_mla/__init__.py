"""The draft backend of SGLang's FlashInfer for dense latents, whose kernel uses the offsets and lengths of its plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attn_backends import AttentionBackend
from builders import HostLengths
from engine_kits.sglang.attention import attend
from engine_kits.sglang.builder import DraftAttention, PlannedSteps
from engine_kits.sglang.stand_in import STEPS
from engine_kits.subjects import DENSE_LATENT, backend_class


class FlashInferMLAMultiStepDraftBackend(PlannedSteps):
    host_lengths = HostLengths.EXACT

    @staticmethod
    def make(runner: Any) -> Any:
        import sglang.srt.layers.attention.flashinfer_mla_backend as engine_module

        vars(engine_module)["BatchMLAPagedAttentionWrapper"] = _Wrapper
        return engine_module.FlashInferMLAMultiStepDraftBackend(runner, topk=1, speculative_num_steps=STEPS)

    @staticmethod
    def kernel_inputs(metadata: Any, batch: Any, live: int) -> dict[str, Tensor]:
        wrapper = metadata.decode_wrapper
        read = _planned(wrapper.starts[:live], wrapper.lengths[:live], wrapper.indices)
        return {"kv_len_arr": wrapper.lengths[:live], "kv_indptr": wrapper.starts[:live], "kv_indices": torch.cat(read)}

    @staticmethod
    def slots(metadata: Any, batch: Any) -> list[Tensor]:
        wrapper = metadata.decode_wrapper
        return _planned(wrapper.starts, wrapper.lengths, wrapper.indices)


def backend() -> type[AttentionBackend]:
    return backend_class(__name__, FlashInferMLAMultiStepDraftBackend, DENSE_LATENT, DraftAttention)


@dataclass(init=False, eq=False)
class _Wrapper:
    """Replaces FlashInfer's own, whose plan gives the start and the number of each row's slots."""

    indices: Tensor
    starts: Tensor
    lengths: Tensor

    def __init__(
        self, workspace: Tensor, *, kv_indices: Tensor | None = None, kv_len_arr: Tensor | None = None, **_: Any
    ) -> None:
        self._float_workspace_buffer = self._int_workspace_buffer = self._pin_memory_int_workspace_buffer = workspace
        self._cached_module = SimpleNamespace(plan=self._plan)
        if kv_indices is not None and kv_len_arr is not None:
            self.indices = kv_indices
            self.starts, self.lengths = torch.zeros_like(kv_len_arr), torch.zeros_like(kv_len_arr)

    def plan(self, q_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_lengths: Tensor, *settings: Any) -> None:
        """Plan like FlashInfer for a graph: copy the indices into the graph's buffer, then plan."""
        self.indices[: len(kv_indices)].copy_(kv_indices)
        self._scale = settings[5]
        self._plan(None, None, None, q_indptr, kv_indptr, kv_lengths)

    def _plan(self, *args: Any) -> None:
        """The common end of both FlashInfer plans: each row's offset and length go into its work."""
        offsets, lengths = args[4], args[5]
        self.starts.copy_(offsets[:-1])
        self.lengths.copy_(lengths)

    def run(self, q_nope: Tensor, q_rope: Tensor, latents: Tensor, rotary: Tensor, *, out: Tensor, **_: Any) -> Tensor:
        query, key = torch.cat([q_nope, q_rope], -1), torch.cat([latents, rotary], -1)
        read = (self.starts, self.lengths, self.indices)
        attend(out, query, key, latents, partial(_planned, *read), read, self._scale)
        return out


def _planned(starts: Tensor, lengths: Tensor, slots: Tensor) -> list[Tensor]:
    return [slots[first : first + n] for first, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
