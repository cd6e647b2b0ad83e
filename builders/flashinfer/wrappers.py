"""FlashInfer's wrappers, planned once for a batch shape so that their plan can be recomputed on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flashinfer  # type: ignore[import-not-found]
import torch

from builders.batch import AttentionBatch
from builders.flashinfer.layout import PlanLayout
from builders.paged import num_sms
from builders.spec import AttentionSpec

_PARTIALS = 128 << 20
"""Bytes for partial outputs, where a batch does not need more: FlashInfer's own recommendation."""
_PLAN = 1 << 20
"""Bytes for a plan: a grid of a few hundred tiles and a row per query token."""


@dataclass(frozen=True, slots=True)
class PlannedWrapper:
    """A wrapper in CUDA-graph mode over a block table, and what is recomputed in place for its batch shape.

    last_page_len int32 [num_reqs]; plan uint8 [n], laid out as `layout` says.
    """

    wrapper: Any
    layout: PlanLayout
    last_page_len: torch.Tensor
    plan: torch.Tensor


class FlashInferWrappers:
    """Makes the wrappers of one spec on one device; they share a workspace, since they run one after the other."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self.spec = spec
        self.device = device
        self._partials = torch.empty(0, dtype=torch.uint8, device=device)
        self._counters: torch.Tensor | None = None

    def workspace(self, num_reqs: int, num_tokens: int) -> torch.Tensor:
        """Bytes for the partial outputs of a batch.

        FA2's need: its PrefillPlan in attention/scheduler.cuh of FlashInfer 0.6.12, with the largest query tile it may
        choose for the batch.
        """
        spec = self.spec
        query_tile = 16 if num_tokens == num_reqs and spec.group_size <= 16 else 128
        tiles = max(
            2 * num_sms(self.device) // spec.num_kv_heads,
            -(-num_tokens * spec.group_size // query_tile) + num_reqs - 1,
        )
        needed = max(_PARTIALS, 4 * spec.num_q_heads * tiles * query_tile * (spec.head_dim + 1))
        if self._partials.numel() < needed:
            self._partials = torch.empty(needed, dtype=torch.uint8, device=self.device)
        return self._partials

    def counters(self) -> torch.Tensor:
        """XQA's workspace. It counts in it, from 0, and leaves 0 behind: no other kernel may write there."""
        if self._counters is None:
            self._counters = torch.zeros(_PARTIALS, dtype=torch.uint8, device=self.device)
        return self._counters

    def decode(self, batch: AttentionBatch, *, tensor_cores: bool) -> PlannedWrapper:
        """For single-token rows over the batch's block table."""
        indptr, last_page_len = self._table_indptr(batch), self._ones(batch)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace(batch.num_reqs, batch.num_reqs),
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=tensor_cores,
            paged_kv_indptr_buffer=indptr.to(self.device),
            paged_kv_indices_buffer=batch.block_table.view(-1),
            paged_kv_last_page_len_buffer=last_page_len,
        )
        plan = self._use_plan(wrapper)
        self.plan_decode(wrapper, indptr, last_page_len.cpu())
        if tensor_cores:
            layout = self._layout(wrapper, batch)
        else:
            info = list(wrapper._plan_info)
            layout = PlanLayout.of_cuda_cores(info, num_reqs=batch.num_reqs, page_size=self.spec.page_size)
        return PlannedWrapper(wrapper, layout, last_page_len, _used(plan, layout))

    def plan_decode(self, wrapper: Any, indptr: torch.Tensor, last_page_len: torch.Tensor) -> None:
        """FlashInfer's own plan() for a decode wrapper whose pages are in place; both tensors int32 on the host."""
        wrapper.plan(indptr, self._no_pages(), last_page_len, *self._sizes(), **self._numbers())

    def extend(self, batch: AttentionBatch) -> PlannedWrapper:
        """For rows of max_query_len tokens each over the batch's block table."""
        starts = torch.arange(batch.num_reqs + 1, dtype=torch.int32) * batch.max_query_len
        indptr, last_page_len = self._table_indptr(batch), self._ones(batch)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self.workspace(batch.num_reqs, batch.num_tokens),
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=starts.to(self.device),
            paged_kv_indptr_buf=indptr.to(self.device),
            paged_kv_indices_buf=batch.block_table.view(-1),
            paged_kv_last_page_len_buf=last_page_len,
            backend="fa2",
        )
        plan = self._use_plan(wrapper)
        rows = (starts, indptr, self._no_pages(), last_page_len.cpu())
        wrapper.plan(*rows, *self._sizes(), causal=True, **self._numbers())
        layout = self._layout(wrapper, batch)
        return PlannedWrapper(wrapper, layout, last_page_len, _used(plan, layout))

    def ragged(self, batch: AttentionBatch) -> Any:
        """A wrapper for this batch alone, planned on the host for its lengths."""
        size, table, lens = self.spec.page_size, batch.block_table.cpu(), batch.seq_lens.cpu()
        pages = (lens + size - 1) // size
        owned = torch.arange(table.shape[1]) < pages[:, None]
        rows = (
            batch.query_start_loc.cpu(),
            torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int(),
            table[owned].to(self.device),
            (lens - (pages - 1).clamp_(min=0) * size).int(),
        )
        workspace = self.workspace(batch.num_reqs, batch.num_tokens)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        wrapper.plan(*rows, *self._sizes(), causal=True, **self._numbers())
        return wrapper

    def _table_indptr(self, batch: AttentionBatch) -> torch.Tensor:
        """Rows of the block table as they lie, whatever their lengths: on the host, int32 [num_reqs + 1]."""
        return torch.arange(batch.num_reqs + 1, dtype=torch.int32) * batch.block_table.shape[1]

    def _ones(self, batch: AttentionBatch) -> torch.Tensor:
        return torch.ones(batch.num_reqs, dtype=torch.int32, device=self.device)

    def _no_pages(self) -> torch.Tensor:
        """The pages are in place already, and a plan does not depend on them."""
        return torch.empty(0, dtype=torch.int32, device=self.device)

    def _use_plan(self, wrapper: Any) -> torch.Tensor:
        plan = torch.zeros(_PLAN, dtype=torch.uint8, device=self.device)
        wrapper.reset_workspace_buffer(self._partials, plan)
        # plan() copies the gaps between its arrays too: let them be the same each time.
        wrapper._pin_memory_int_workspace_buffer.zero_()
        return plan

    def _sizes(self) -> tuple[int, int, int, int]:
        return self.spec.num_q_heads, self.spec.num_kv_heads, self.spec.head_dim, self.spec.page_size

    def _numbers(self) -> dict[str, Any]:
        return {
            "window_left": self.spec.window_left,
            "logits_soft_cap": self.spec.soft_cap,
            "sm_scale": self.spec.softmax_scale,
            "q_data_type": self.spec.dtype,
            "kv_data_type": self.spec.cache_dtype,
        }

    def _layout(self, wrapper: Any, batch: AttentionBatch) -> PlanLayout:
        sms, query_len = num_sms(self.device), batch.max_query_len
        info = list(wrapper._plan_info)
        return PlanLayout.of_tensor_cores(info, self.spec, num_reqs=batch.num_reqs, num_sms=sms, query_len=query_len)


def _used(plan: torch.Tensor, layout: PlanLayout) -> torch.Tensor:
    return plan[: -(-layout.num_bytes // 4) * 4]
