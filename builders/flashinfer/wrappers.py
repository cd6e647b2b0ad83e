"""FlashInfer's wrappers, planned once per batch shape in a form whose plan can be recomputed on the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from typing import Any

import torch

from builders.batch import AttentionBatch
from builders.devices import num_sms
from builders.errors import require
from builders.flashinfer.layout import PlanLayout, planned_pages
from builders.flashinfer.table_rows import TableRows, row_stride
from builders.spec import AttentionSpec

_PARTIAL_BYTES = 128 << 20
"""Default bytes for partial outputs, FlashInfer's own recommendation; more if a batch needs it."""
_PLAN_BYTES = 1 << 20
"""Default bytes for a plan: a grid of a few thousand tiles, as many rows and query tokens; more if a batch needs it."""


class Kernel(str, Enum):
    """FlashInfer's kernels: three for batches with one query token per request, two for any other batch."""

    TENSOR_CORES = "tensor_cores"
    CUDA_CORES = "cuda_cores"
    XQA = "xqa"
    EXTEND = "extend"
    """The prefill wrapper, if all rows have the same query length."""
    RAGGED = "ragged"
    """The prefill wrapper planned on the host for one batch."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A kernel and what it was planned with: a wrapper, or XQA's workspace. No slots: a WeakValueDictionary holds it.

    last_page_len  int32 [num_reqs]   recomputed in place together with the plan; empty if there is none
    plan           uint8 [n]          laid out as `layout` says
    """

    kernel: Kernel
    num_reqs: int
    num_tokens: int
    """Query tokens of the rows; those behind the last row belong to none, and FlashInfer refuses them."""
    query_len: int
    last_page_len: torch.Tensor = field(compare=False, repr=False)
    plan: torch.Tensor = field(compare=False, repr=False)
    wrapper: Any = field(default=None, compare=False, repr=False)
    workspace: torch.Tensor | None = field(default=None, compare=False, repr=False)
    layout: PlanLayout | None = field(default=None, compare=False, repr=False)
    row_stride: int = field(default=0, compare=False, repr=False)
    """Entries from one row of the block table to the next."""


class FlashInferWrappers:
    """Makes the wrappers of one spec on one device; they share a workspace, since they run one after the other.

    kv_layout  page layout in FlashInfer's notation: NHD or HND
    partials   uint8, an existing workspace, used if it is large enough
    """

    def __init__(
        self,
        spec: AttentionSpec,
        device: torch.device,
        *,
        kv_layout: str = "NHD",
        partials: torch.Tensor | None = None,
    ) -> None:
        self.spec = spec
        self.device = device
        self._kv_layout = kv_layout
        # Imported here and no earlier: the import starts CUDA.
        self._flashinfer: Any = import_module("flashinfer")
        self._partials = torch.empty(0, dtype=torch.uint8, device=device) if partials is None else partials
        self._counters: torch.Tensor | None = None
        self._empty = torch.empty(0, dtype=torch.int32, device=device)
        self._sizes = (spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.page_size)
        self._plan_options = {
            "window_left": spec.window_left,
            "logits_soft_cap": spec.soft_cap,
            "sm_scale": spec.softmax_scale,
            "q_data_type": spec.dtype,
            "kv_data_type": spec.cache_dtype,
        }

    def xqa(self, batch: AttentionBatch) -> Launch:
        """Prepare XQA, which reads lengths and pages itself. Its workspace holds counters, 0 before and after each run,
        so no other kernel can write there. Raises BatchError for a block table with gaps between rows."""
        require(
            batch.block_table.is_contiguous(),
            f"XQA reads the block table as one list of pages without gaps, got strides {batch.block_table.stride()}; "
            "it would read wrong pages. Pass all columns of one table.",
        )
        if self._counters is None:
            self._counters = torch.zeros(_PARTIAL_BYTES, dtype=torch.uint8, device=self.device)
        return self._launch(Kernel.XQA, batch, workspace=self._counters)

    def decode(self, batch: AttentionBatch, kernel: Kernel) -> Launch:
        """Plan single-token rows over the batch's block table, for TENSOR_CORES or CUDA_CORES."""
        indptr, pages, last_page_len = TableRows.of(batch.block_table)
        wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace(batch.num_reqs, batch.num_reqs),
            self._kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=kernel is Kernel.TENSOR_CORES,
            paged_kv_indptr_buffer=indptr.to(self.device),
            paged_kv_indices_buffer=pages,
            paged_kv_last_page_len_buffer=last_page_len,
        )
        plan = self._plan_of(wrapper, batch)
        self.plan_decode(wrapper, indptr, last_page_len.cpu())
        return self._planned(kernel, batch, wrapper, last_page_len, plan)

    def plan_decode(self, wrapper: Any, indptr: torch.Tensor, last_page_len: torch.Tensor) -> None:
        """Call FlashInfer's plan() on a decode wrapper whose pages are in place.

        indptr         int32 [num_reqs + 1], on the host
        last_page_len  int32 [num_reqs], on the host
        """
        # No pages are passed: the plan does not depend on them.
        wrapper.plan(indptr, self._empty, last_page_len, *self._sizes, **self._plan_options)

    def extend(self, batch: AttentionBatch) -> Launch:
        """Plan rows of max_query_len tokens each over the batch's block table; trees attend to their cached prefix.
        Raises BatchError as `planned_pages` does."""
        starts = torch.arange(batch.num_reqs + 1, dtype=torch.int32, device="cpu") * batch.max_query_len
        indptr, pages, last_page_len = TableRows.of(batch.block_table)
        wrapper = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace(batch.num_reqs, batch.num_tokens),
            self._kv_layout,
            use_cuda_graph=True,
            qo_indptr_buf=starts.to(self.device),
            paged_kv_indptr_buf=indptr.to(self.device),
            paged_kv_indices_buf=pages,
            paged_kv_last_page_len_buf=last_page_len,
            backend="fa2",
        )
        plan = self._plan_of(wrapper, batch)
        rows = (starts, indptr, self._empty, last_page_len.cpu())
        wrapper.plan(*rows, *self._sizes, causal=self._causal(batch), **self._plan_options)
        return self._planned(Kernel.EXTEND, batch, wrapper, last_page_len, plan)

    def ragged(self, batch: AttentionBatch, kv_lens: torch.Tensor) -> Launch:
        """Plan this batch only, on the host, to attend to kv_lens tokens, int32 [num_reqs]. Raises BatchError as
        `planned_pages` does."""
        size, table, lens = self.spec.page_size, batch.block_table.cpu(), kv_lens.cpu()
        starts = batch.query_start_loc.cpu()
        pages = (lens + size - 1) // size
        owned = torch.arange(table.shape[1], device="cpu") < pages[:, None]
        rows = (
            starts,
            torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int(),
            table[owned].to(self.device),
            (lens - (pages - 1).clamp_(min=0) * size).int(),
        )
        workspace = self._workspace(batch.num_reqs, batch.num_tokens)
        wrapper = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, self._kv_layout, backend="fa2")
        wrapper.plan(*rows, *self._sizes, causal=self._causal(batch), **self._plan_options)
        query_tile, split = wrapper._plan_info[3], wrapper._plan_info[14]
        if split:
            longest = int(lens.max())
            planned_pages(self.spec, query_len=batch.max_query_len, query_tile=query_tile, max_seq_len=longest)
        return self._launch(Kernel.RAGGED, batch, wrapper=wrapper, num_tokens=int(starts[-1]))

    def _causal(self, batch: AttentionBatch) -> bool:
        """All tokens of a tree see their whole cached prefix."""
        return self.spec.causal and batch.tree_masks is None

    def _workspace(self, num_reqs: int, num_tokens: int) -> torch.Tensor:
        """Return bytes for the partial outputs of a batch.

        The size is FA2's: PrefillPlan in attention/scheduler.cuh of FlashInfer 0.6.12, with the largest query tile it
        can choose for the batch.
        """
        spec = self.spec
        query_tile = 16 if num_tokens == num_reqs and spec.group_size <= 16 else 128
        tiles = max(
            2 * num_sms(self.device) // spec.num_kv_heads, -(-num_tokens * spec.group_size // query_tile) + num_reqs - 1
        )
        needed = max(_PARTIAL_BYTES, 4 * spec.num_q_heads * tiles * query_tile * (spec.head_dim + 1))
        if self._partials.numel() < needed:
            self._partials = torch.empty(needed, dtype=torch.uint8, device=self.device)
        return self._partials

    def _plan_of(self, wrapper: Any, batch: AttentionBatch) -> torch.Tensor:
        num_reqs, num_tokens, spec = batch.num_reqs, batch.num_tokens, self.spec
        # FA2's size with its smallest query tile: 13 bytes per tile, 4 per row and query token, and gaps in between.
        tiles = max(2 * num_sms(self.device), -(-num_tokens * spec.group_size // 16)) + num_reqs
        needed = max(_PLAN_BYTES, 16 * tiles + 4 * (num_reqs + num_tokens) + 256)
        plan = torch.zeros(needed, dtype=torch.uint8, device=self.device)
        wrapper.reset_workspace_buffer(self._partials, plan)
        # plan() also copies the gaps between its arrays: make them the same each time.
        wrapper._pin_memory_int_workspace_buffer.zero_()
        return plan

    def _planned(
        self, kernel: Kernel, batch: AttentionBatch, wrapper: Any, last_page_len: torch.Tensor, plan: torch.Tensor
    ) -> Launch:
        info, num_reqs, query_len = list(wrapper._plan_info), batch.num_reqs, batch.max_query_len
        if kernel is Kernel.CUDA_CORES:
            layout = PlanLayout.of_cuda_cores(info, num_reqs=num_reqs, page_size=self.spec.page_size)
        else:
            sms = num_sms(self.device)
            layout = PlanLayout.of_tensor_cores(info, self.spec, num_reqs=num_reqs, num_sms=sms, query_len=query_len)
        plan = plan[: -(-layout.num_bytes // 4) * 4]
        stride = row_stride(batch.block_table)
        return self._launch(
            kernel, batch, last_page_len=last_page_len, plan=plan, wrapper=wrapper, layout=layout, row_stride=stride
        )

    def _launch(self, kernel: Kernel, batch: AttentionBatch, **planned: Any) -> Launch:
        defaults = {"last_page_len": self._empty, "plan": self._empty.view(torch.uint8), "num_tokens": batch.num_tokens}
        return Launch(kernel=kernel, num_reqs=batch.num_reqs, query_len=batch.max_query_len, **{**defaults, **planned})
