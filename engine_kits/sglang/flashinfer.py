"""The draft backend of SGLang's FlashInfer, whose plans read lengths on the host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_backends import AttentionBackend, Feature
from builders import HostLengths
from engine_kits.sglang.attention import attend
from engine_kits.sglang.builder import DraftAttention, PlannedSteps
from engine_kits.sglang.stand_in import STEPS
from engine_kits.subjects import HEADS, backend_class


class FlashInferMultiStepDraftBackend(PlannedSteps):
    host_lengths = HostLengths.EXACT

    @staticmethod
    def make(runner: Any) -> Any:
        import sglang.srt.layers.attention.flashinfer_backend as engine_module

        vars(engine_module).update(BatchDecodeWithPagedKVCacheWrapper=_Wrapper, fast_decode_plan=_fast_decode_plan)
        return engine_module.FlashInferMultiStepDraftBackend(runner, topk=1, speculative_num_steps=STEPS)

    @staticmethod
    def kernel_inputs(metadata: Any, batch: Any, live: int) -> dict[str, Tensor]:
        (wrapper,) = metadata.decode_wrappers
        ends = wrapper.indptr[: live + 1]
        return {"kv_indptr": ends, "kv_indices": wrapper.indices[: ends[-1]], "planned": wrapper.planned[: live + 1]}

    @staticmethod
    def slots(metadata: Any, batch: Any) -> list[Tensor]:
        (wrapper,) = metadata.decode_wrappers
        return _planned(wrapper.indptr, wrapper.planned, wrapper.indices)


def backend() -> type[AttentionBackend]:
    # SGLang has one wrapper per step; a model with windows would need two.
    plain = replace(HEADS, features=frozenset({Feature.GQA}))
    return backend_class(__name__, FlashInferMultiStepDraftBackend, plain, DraftAttention)


@dataclass(init=False, eq=False)
class _Wrapper:
    """Replaces FlashInfer's own. planned: the offsets that the plan was made from; FlashInfer keeps their results."""

    indptr: Tensor
    indices: Tensor
    planned: Tensor

    def __init__(
        self,
        workspace: Tensor,
        layout: str,
        *,
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        **_: Any,
    ) -> None:
        self.is_cuda_graph_enabled = use_cuda_graph
        if paged_kv_indptr_buffer is not None and paged_kv_indices_buffer is not None:
            self.indptr, self.indices = paged_kv_indptr_buffer, paged_kv_indices_buffer
            self.planned = torch.zeros_like(paged_kv_indptr_buffer)

    def begin_forward(self, indptr: Tensor, indices: Tensor, *_: Any, **__: Any) -> None:
        """Plan like FlashInfer for a graph: copy the arguments into the graph's buffers."""
        self.indptr.copy_(indptr)
        self.indices[: len(indices)].copy_(indices)
        self.planned.copy_(indptr)

    def forward(self, query: Tensor, cache: tuple[Tensor, Tensor], *, sm_scale: float, **_: Any) -> Tensor:
        out, (key, value) = torch.empty_like(query), cache
        read = (self.indptr, self.planned, self.indices)
        attend(out, query, key, value, partial(_planned, *read), read, sm_scale)
        return out


def _planned(ends: Tensor, planned: Tensor, slots: Tensor) -> list[Tensor]:
    """Return each row's slots, as many as work is planned for."""
    starts, lengths = ends.tolist(), planned.diff().tolist()
    return [slots[start : start + length] for start, length in zip(starts, lengths, strict=False)]


def _fast_decode_plan(
    wrapper: _Wrapper, indptr: Tensor, *_: Any, global_override_indptr_cpu: Tensor | None = None, **__: Any
) -> None:
    """Plan like FlashInfer's, which copies nothing and uses the host's offsets."""
    wrapper.planned.copy_(indptr if global_override_indptr_cpu is None else global_override_indptr_cpu)
