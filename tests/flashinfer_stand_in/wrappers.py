"""FlashInfer's wrappers of paged attention, as far as we use them: decode.py and prefill.py of FlashInfer 0.6.12."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import torch

from builders.devices import num_sms
from tests.builders.flashinfer.host_planner import HostPlan, plan_cuda_cores, plan_tensor_cores
from tests.flashinfer_stand_in.kernels import attend
from tests.flashinfer_stand_in.planning import plan_once, write_plan

CTAS_PER_SM = 2
"""Occupancy of the CUDA-core kernel; small, so that small batches occur both with and without splits."""
_INT_WORKSPACE = 1 << 18
"""Bytes; FlashInfer allocates 8 MiB, which a test does not need."""

_leftover = cycle(range(1, 256))


class _Wrapper:
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        tensor_cores: bool,
    ) -> None:
        if kv_layout != "NHD":
            raise KeyError(f"the stand-in knows pages [page_size, num_kv_heads, head_dim] (NHD), got {kv_layout}")
        if use_cuda_graph and not all(torch.is_tensor(buffer) for buffer in (indptr, indices, last_page_len)):
            raise ValueError("the paged_kv buffers should be tensors in CUDA graph mode")
        if use_cuda_graph and len(indptr) != len(last_page_len) + 1:
            raise ValueError("The size of paged_kv_indptr_buffer should be batch_size + 1")
        self.device = float_workspace_buffer.device
        self._graph, self._tensor_cores = use_cuda_graph, tensor_cores
        self._qo_indptr_buf: Any = None
        self._paged_kv_indptr_buf = indptr
        self._paged_kv_indices_buf = indices
        self._paged_kv_last_page_len_buf = last_page_len
        self._plan_info: list[int] | None = None
        self.reset_workspace_buffer(
            float_workspace_buffer, torch.empty(_INT_WORKSPACE, dtype=torch.uint8, device="cpu")
        )

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = int_workspace_buffer
        # Holds leftovers, never the same ones.
        self._pin_memory_int_workspace_buffer = torch.full_like(int_workspace_buffer, next(_leftover))

    def _plan(
        self,
        query_lens: list[int] | None,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        self._take_rows(indptr, indices, last_page_len)
        heads = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        host = self._host_plan(indptr.diff().tolist(), query_lens, window_left, page_size=page_size, **heads)
        write_plan(
            host,
            self._int_workspace_buffer,
            self._pin_memory_int_workspace_buffer,
            self._float_workspace_buffer,
            num_q_heads=num_q_heads,
            head_dim=head_dim,
            num_rows=sum(query_lens or []),
        )
        self._plan_info = host.info
        self._window_left = window_left
        self._soft_cap = logits_soft_cap or 0.0
        self._sm_scale = head_dim**-0.5 if sm_scale is None else sm_scale
        self._dtypes = (q_data_type, kv_data_type or q_data_type)
        served = q_data_type.itemsize == 2 and self._dtypes[1] in (q_data_type, torch.float8_e4m3fn)
        if not served or head_dim not in (64, 128, 256, 512):
            raise RuntimeError(f"no kernel of {self._dtypes} and head_dim {head_dim}")

    def _take_rows(self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor) -> None:
        if not self._graph:
            self._paged_kv_indptr_buf = indptr.to(self.device)
            self._paged_kv_indices_buf = indices.to(self.device)
            self._paged_kv_last_page_len_buf = last_page_len.to(self.device)
            return
        if len(last_page_len) != len(self._paged_kv_last_page_len_buf):
            raise ValueError("The batch size should be fixed in cudagraph mode")
        if len(indices) > len(self._paged_kv_indices_buf):
            raise ValueError("The size of indices should be less than or equal to the allocated buffer")
        self._paged_kv_indptr_buf.copy_(indptr)
        self._paged_kv_last_page_len_buf.copy_(last_page_len)
        self._paged_kv_indices_buf[: len(indices)].copy_(indices)

    def _host_plan(self, pages: list[int], query_lens: list[int] | None, window_left: int, **sizes: int) -> HostPlan:
        sms = num_sms(self.device)
        if query_lens is None:
            if (group := sizes["num_q_heads"] // sizes["num_kv_heads"]) not in (1, 2, 3, 4, 8):
                raise RuntimeError(f"Unsupported group_size: {group}")
            return plan_cuda_cores(pages, max_grid_size=CTAS_PER_SM * sms, **sizes)
        plan = plan_tensor_cores if self._graph else plan_once
        return plan(pages, query_lens, num_sms=sms, window_left=window_left, **sizes)

    def _run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        causal: bool,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out, and the base-2 lse, fp32 [num_tokens, num_q_heads]."""
        key, value = paged_kv_cache
        if (q.dtype, key.dtype) != self._dtypes:
            raise ValueError(f"queries and keys of {q.dtype} and {key.dtype} do not match the plan's {self._dtypes}")
        if key.stride() != value.stride():
            raise RuntimeError(f"k/v strides differs: {key.stride()} and {value.stride()}")
        check_layout(q, key, value, out)
        lse = out.new_empty(out.shape[:2], dtype=torch.float32)
        attend(
            q,
            key,
            value,
            self._qo_indptr_buf if self._tensor_cores else None,
            self._paged_kv_indptr_buf,
            self._paged_kv_indices_buf,
            self._paged_kv_last_page_len_buf,
            self._int_workspace_buffer,
            self._float_workspace_buffer,
            out,
            lse,
            self._plan_info,
            causal,
            self._window_left,
            self._soft_cap,
            self._sm_scale * (1.0 if k_scale is None else k_scale),
        )
        if v_scale is not None:
            out *= v_scale
        return out, lse


def check_layout(q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor) -> None:
    """Check what the kernels assume: they load 16 bytes at once and ignore the output's strides."""
    for tensor in (q, key, value):
        steps = [stride * tensor.element_size() for stride in tensor.stride()[:-1]]
        if tensor.stride(-1) != 1 or any(step % 16 for step in steps):
            raise RuntimeError(f"misaligned address: strides {tensor.stride()}")
    if out.shape != q.shape or not out.is_contiguous():
        raise RuntimeError(f"illegal memory access: output {list(out.shape)} with strides {out.stride()}")


def refuse_overlap(enable_pdl: bool | None) -> None:
    """Require PDL to be off: by default FlashInfer launches with PDL on Hopper."""
    if enable_pdl is not False:
        raise RuntimeError("with PDL a kernel reads its plan before the kernel that writes the plan has ended")


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        rows = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, *rows, use_tensor_cores)

    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, *sizes: int, **numbers: Any
    ) -> None:
        num_reqs = len(last_page_len)
        self._qo_indptr_buf = torch.arange(num_reqs + 1, dtype=torch.int32, device=self.device)
        query_lens = [1] * num_reqs if self._tensor_cores else None
        self._plan(query_lens, indptr, indices, last_page_len, *sizes, **numbers)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor | None = None,
        enable_pdl: bool | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> torch.Tensor:
        refuse_overlap(enable_pdl)
        if len(q) != len(self._paged_kv_last_page_len_buf):
            raise ValueError(f"q.shape[0] ({len(q)}) does not match batch_size * q_len_per_req")
        out = torch.empty_like(q) if out is None else out
        return self._run(q, paged_kv_cache, out, causal=False, k_scale=k_scale, v_scale=v_scale)[0]


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        *,
        backend: str = "auto",
    ) -> None:
        if backend != "fa2":
            raise KeyError(f"the stand-in is FA2's, on Hopper {backend!r} is another kernel with another plan")
        rows = (paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, *rows, True)
        if use_cuda_graph and not torch.is_tensor(qo_indptr_buf):
            raise ValueError("qo_indptr_buf should be a torch.Tensor in CUDA graph mode")
        self._qo_indptr_buf = qo_indptr_buf

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        **numbers: Any,
    ) -> None:
        if self._graph:
            self._qo_indptr_buf.copy_(qo_indptr)
        else:
            self._qo_indptr_buf = qo_indptr.to(self.device)
        self._num_rows, self._causal = int(qo_indptr[-1]), causal
        rows = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        sizes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._plan(qo_indptr.diff().tolist(), *rows, *sizes, **numbers)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> Any:
        refuse_overlap(enable_pdl)
        if len(q) != self._num_rows:
            raise ValueError(f"q.shape[0] ({len(q)}) does not match qo_indptr[-1] ({self._num_rows})")
        out = torch.zeros_like(q) if out is None else out
        found = self._run(q, paged_kv_cache, out, causal=self._causal, k_scale=k_scale, v_scale=v_scale)
        return found if return_lse else found[0]
