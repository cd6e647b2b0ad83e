"""A stand-in for the package flashinfer: wrappers that attend, in plain torch, to what they were given and planned for.

The decode wrapper reads its plan as the kernel does: tokens that no chunk of it covers are left out.
"""

from __future__ import annotations

from types import ModuleType

import torch

from tests.builders.flashinfer_host_planner import plan_tensor_cores

NUM_SMS = 8
"""As many as builders.paged_views says of a CPU."""


class Decode:
    def __init__(self, workspace, layout="NHD", **options):
        assert (workspace.dtype, layout) == (torch.uint8, "NHD") and options.pop("use_tensor_cores")
        self.graph = options.pop("use_cuda_graph", False)
        self.buffers = [options.pop(f"paged_kv_{name}_buffer", None) for name in ("indptr", "indices", "last_page_len")]
        assert not options
        self.plans = []

    def reset_workspace_buffer(self, partials, plan):
        self.int_workspace = plan
        self._pin_memory_int_workspace_buffer = torch.zeros(1)

    def plan(self, indptr, indices, last_page_len, q_heads, kv_heads, dim, page_size, *, sm_scale, **others):
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert others.get("window_left", -1) == -1 and not others.get("logits_soft_cap")
        self.plans.append((indptr.tolist(), last_page_len.tolist()))
        self.page_size, self.scale = page_size, sm_scale
        given = indptr, indices, last_page_len
        if self.graph:
            for buffer, tensor in zip(self.buffers, given, strict=True):
                buffer[: len(tensor)].copy_(tensor)
        else:
            self.buffers = list(given)
        self.host = plan_tensor_cores(
            indptr.diff().tolist(), [1] * len(last_page_len), page_size=page_size, num_q_heads=q_heads,
            num_kv_heads=kv_heads, head_dim=dim, num_sms=NUM_SMS,
        )  # fmt: skip
        self._plan_info = self.host.info
        if self.graph:
            self._write_plan()

    def _write_plan(self):
        info, arrays = self.host.info, self.host.arrays
        names = ("request_indices", "qo_tile_indices", "kv_tile_indices", "merge_indptr", "o_indptr", "kv_chunk_size")
        for name, offset in zip(names, info[4:10], strict=True):
            values = torch.tensor(arrays[name], dtype=torch.int32)
            self.int_workspace.view(torch.int32)[offset // 4 :][: len(values)] = values
        mask = torch.tensor(arrays["block_valid_mask"], dtype=torch.uint8)
        self.int_workspace[info[12] :][: len(mask)] = mask

    def _covered(self, request):
        """Tokens of a request that the chunks of the plan reach."""
        info, ints = self.host.info, self.int_workspace.view(torch.int32)
        valid = self.int_workspace[info[12] :][: info[0]].bool()
        chunks = (ints[info[4] // 4 :][: info[0]][valid] == request).sum()
        return int(chunks * ints[info[9] // 4])

    def run(self, query, cache, out=None, enable_pdl=None):
        indptr, indices, last_page_len = self.buffers
        out = torch.empty_like(query) if out is None else out
        for request, (first, end) in enumerate(zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)):
            length = (end - first - 1) * self.page_size + int(last_page_len[request])
            length = min(length, self._covered(request)) if self.graph else length
            key, value = (part[indices[first:end].clamp(min=0).long()].flatten(0, 1)[:length] for part in cache)
            group = query.shape[1] // key.shape[1]
            key, value = (part.float().repeat_interleave(group, 1).transpose(0, 1) for part in (key, value))
            weights = (query[request].float()[:, None] @ key.mT * self.scale).softmax(-1)
            out[request] = (weights @ value)[:, 0].to(out.dtype)
        return out


class Mla:
    def __init__(self, workspace, *, backend):
        assert (workspace.dtype, backend) == (torch.uint8, "fa3")

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len, heads, dim, rotary, page_size, causal, scale, q_dtype, kv_dtype
    ):
        assert {each.dtype for each in (qo_indptr, kv_indptr, kv_indices, kv_len)} == {torch.int32}
        assert qo_indptr.tolist() == list(range(len(kv_len) + 1)) and not causal
        self.rows = kv_indptr.tolist(), kv_indices, kv_len.tolist()
        self.sizes, self.scale, self.dtypes = (heads, dim, rotary, page_size), scale, (q_dtype, kv_dtype)

    def run(self, q_nope, q_pe, ckv, kpe):
        assert (q_nope.shape[1], ckv.shape[2], kpe.shape[2], ckv.shape[1]) == self.sizes
        assert (q_nope.dtype, ckv.dtype) == self.dtypes
        out = torch.empty_like(q_nope)
        indptr, indices, lens = self.rows
        for request, length in enumerate(lens):
            pages = indices[indptr[request] : indptr[request + 1]].long()
            nope, rotary = (part[pages].flatten(0, 1)[:length].float() for part in (ckv, kpe))
            scores = q_nope[request].float() @ nope.T + q_pe[request].float() @ rotary.T
            out[request] = ((scores * self.scale).softmax(-1) @ nope).to(out.dtype)
        return out


def modules() -> dict[str, ModuleType]:
    """What goes into sys.modules."""
    package, decode, mla = (ModuleType(f"flashinfer{name}") for name in ("", ".decode", ".mla"))
    package.__version__ = "of the tests"
    package.BatchDecodeWithPagedKVCacheWrapper = Decode
    decode.trtllm_batch_decode_with_kv_cache = None
    mla.BatchMLAPagedAttentionWrapper = Mla
    return {module.__name__: module for module in (package, decode, mla)}
