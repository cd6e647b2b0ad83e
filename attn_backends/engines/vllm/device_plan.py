"""The plan of an engine's FlashInfer wrapper, rewritten on the device after its first planning."""

from __future__ import annotations

from typing import Any

import torch

from attn_backends.engines.vllm.compat import requirement
from builders import AttentionSpec
from builders.devices import num_sms
from builders.flashinfer import PlanLayout, TableRows, replan

NO_FLASHINFER = f"needs FlashInfer, which vLLM requires: pip install '{requirement()}'"


class DevicePlan:
    """Owns a graph-mode decode wrapper that was planned once, for any lengths; `refresh` rewrites its plan.

    wrapper      FlashInfer's, on tensor cores, planned for rows of query_len tokens each; nobody else can plan it again
    spec         the attention of one rank: its heads, page size and window
    seq_lens     int32 [num_reqs]              the engine's buffer, read by each refresh
    block_table  int32 [num_reqs, max_pages]   the engine's buffer, with any row stride, read by the kernel

    Raises BatchError for a plan of another kernel, FlashInfer release or batch, and for rows with a window that are not
    causal and longer than a query tile.
    """

    def __init__(
        self, wrapper: Any, spec: AttentionSpec, seq_lens: torch.Tensor, block_table: torch.Tensor, *, query_len: int
    ) -> None:
        rows = TableRows.of(block_table)
        num_reqs, device = len(seq_lens), block_table.device
        info = list(wrapper._plan_info)
        self.layout = PlanLayout.of_tensor_cores(
            info, spec, num_reqs=num_reqs, num_sms=num_sms(device), query_len=query_len
        )
        self.wrapper, self.seq_lens, self.last_page_len = wrapper, seq_lens, rows.last_page_len
        self.row_stride = int(rows.indptr[1])
        # The engine's own buffers serve all of its wrappers, and its other batches overwrite them.
        wrapper._paged_kv_indptr_buf = rows.indptr.to(device)
        wrapper._paged_kv_indices_buf = rows.pages
        wrapper._paged_kv_last_page_len_buf = rows.last_page_len
        self.workspace = wrapper._int_workspace_buffer

    def refresh(self) -> None:
        """Rewrite the plan for the current lengths; graph-safe, one kernel."""
        replan(self.seq_lens, self.last_page_len, self.workspace, self.layout, row_stride=self.row_stride)

    def arrays(self) -> dict[str, torch.Tensor]:
        """Return the current plan by array name, without the contents of padding tiles; syncs with the device."""
        layout = self.layout
        mask = self.workspace[layout.block_valid_mask :][: layout.padded_tiles].view(torch.bool)
        ints, tiles = self.workspace.view(torch.int32), int(mask.sum())
        found = {name: ints[offset : offset + length] for name, (offset, length) in layout.arrays.items()}
        trimmed = {name: array[:tiles] if name.endswith("indices") else array for name, array in found.items()}
        return {**trimmed, "block_valid_mask": mask}
