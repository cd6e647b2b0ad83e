"""FlashInfer's wrappers as vLLM 0.33 calls them, over the kernels' stand-in: they attend by the workspace's plan, right
or wrong."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

from attn_backends.kernels.write_kv import write_kv
from tests.builders.flashinfer import host_planner
from tests.flashinfer_stand_in import wrappers

HOST_PLANS: list[str] = []
"""One entry per plan made on the host."""
_SIZES = ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")
_NUMBERS = ("window_left", "logits_soft_cap", "sm_scale", "q_data_type", "kv_data_type")


class Decode(wrappers.BatchDecodeWithPagedKVCacheWrapper):
    """With 1 + K tokens per request, which FlashInfer 0.7.2 plans with a tile of that length."""

    def __init__(self, workspace: torch.Tensor, layout: str, **options: Any) -> None:
        super().__init__(workspace, "NHD", **{**options, "use_tensor_cores": True})
        self.kv_layout = layout
        for buffer in (self._int_workspace_buffer, self._pin_memory_int_workspace_buffer):
            buffer.zero_()

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._graph

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        *,
        q_len_per_req: int,
        **numbers: Any,
    ) -> None:
        HOST_PLANS.append("decode")
        rows = len(last_page_len)
        self._query_len, self._logits_soft_cap = q_len_per_req, numbers["logits_soft_cap"] or 0.0
        self._qo_indptr_buf = torch.arange(rows + 1, dtype=torch.int32) * q_len_per_req
        sizes, known = [numbers[name] for name in _SIZES], {name: numbers[name] for name in _NUMBERS}
        self._plan([q_len_per_req] * rows, indptr, indices, last_page_len, *sizes, **known)

    def run(self, q: torch.Tensor, cache: Any, *, out: torch.Tensor, **options: Any) -> torch.Tensor:
        return self._run(q, _tokens_first(cache, self.kv_layout), out, causal=self._query_len > 1)[0]


class Prefill(wrappers.BatchPrefillWithPagedKVCacheWrapper):
    """vLLM plans it for batches with prefills and for blocks; we plan it once for each shape of blocks."""

    def __init__(self, workspace: torch.Tensor, layout: str, **options: Any) -> None:
        super().__init__(workspace, "NHD", **{**options, "backend": "fa2"})
        self.kv_layout = layout

    def plan(self, *rows: Any, **numbers: Any) -> None:
        HOST_PLANS.append("block" if self._graph else "prefill")
        extra = ("seq_lens", "o_data_type", "fixed_split_size", "disable_split_kv")
        self._logits_soft_cap = numbers["logits_soft_cap"] or 0.0
        super().plan(*rows, **{name: value for name, value in numbers.items() if name not in extra})

    def run(self, q: torch.Tensor, cache: Any, *, out: torch.Tensor, **options: Any) -> torch.Tensor:
        return self._run(q, _tokens_first(cache, self.kv_layout), out, causal=self._causal)[0]


def _tokens_first(cache: Any, layout: str) -> Any:
    """View pages [num_kv_heads, page_size, head_dim] (HND) as the stand-in's (NHD); those are passed as they are."""
    return cache if layout == "NHD" else tuple(part.transpose(1, 2) for part in cache)


def install(monkeypatch: Any, flashinfer: ModuleType) -> None:
    """Install them in vLLM's FlashInfer backend, with everything else it calls in FlashInfer and CUDA."""
    put = lambda name, value: monkeypatch.setattr(flashinfer, name, value)  # noqa: E731
    put("BatchDecodeWithPagedKVCacheWrapper", Decode)
    put("BatchPrefillWithPagedKVCacheWrapper", Prefill)
    put("BatchAttentionWithAttentionSinkWrapper", type("WithSinks", (), {}))  # which nothing here is
    monkeypatch.setattr(sys.modules["flashinfer"], "BatchPrefillWithPagedKVCacheWrapper", Prefill, raising=False)
    put("fast_decode_plan", lambda wrapper, non_blocking=True, **numbers: wrapper.plan(**numbers))
    put("pin_host_range_buf", lambda size: None)
    put("_get_multi_ctas_kv_counter_buffer", lambda *args, **options: None)
    put("get_device_sm_count", lambda *args: host_planner.NUM_SMS)
    monkeypatch.setattr(torch.ops._C_cache_ops, "reshape_and_cache_flash", _store, raising=False)


def _store(key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, *scales: Any) -> None:
    write_kv(key[: len(slots)], value[: len(slots)], key_cache, value_cache, slots)
