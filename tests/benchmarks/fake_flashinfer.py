"""What the benchmarks need of the package flashinfer beside the stand-in's wrappers: its latent attention."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

from tests.flashinfer_stand_in.wrappers import BatchDecodeWithPagedKVCacheWrapper


class Decode(BatchDecodeWithPagedKVCacheWrapper):
    """The stand-in's, with a note of every plan."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.plans = []

    def plan(self, indptr, indices, last_page_len, *sizes, **numbers):
        self.plans.append((indptr.tolist(), last_page_len.tolist()))
        super().plan(indptr, indices, last_page_len, *sizes, **numbers)

    def run(self, *args, enable_pdl=None, **options):
        # A benchmark leaves the peer its default, which overlaps kernels; nothing overlaps here.
        return super().run(*args, enable_pdl=False, **options)


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
    package.__spec__ = ModuleSpec("flashinfer", None, origin=__file__)
    package.BatchDecodeWithPagedKVCacheWrapper = Decode
    decode.trtllm_batch_decode_with_kv_cache = None
    mla.BatchMLAPagedAttentionWrapper = Mla
    return {module.__name__: module for module in (package, decode, mla)}
