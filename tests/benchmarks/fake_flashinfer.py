"""What the benchmarks need of flashinfer in addition to the stand-in's wrappers: its latent attention and sampling."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

from tests.flashinfer_stand_in.wrappers import BatchDecodeWithPagedKVCacheWrapper


class Decode(BatchDecodeWithPagedKVCacheWrapper):
    """The stand-in's wrapper, recording every plan."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.plans = []

    def plan(self, indptr, indices, last_page_len, *sizes, **numbers):
        self.plans.append((indptr.tolist(), last_page_len.tolist()))
        super().plan(indptr, indices, last_page_len, *sizes, **numbers)

    def run(self, *args, enable_pdl=None, **options):
        # A benchmark uses the peer's default, which overlaps kernels; nothing overlaps here.
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


def softmax(logits):
    return logits.softmax(-1)


def top_k_mask_logits(logits, top_k):
    return torch.stack(
        [x.masked_fill(x < x.topk(int(k)).values[-1], -torch.inf) for x, k in zip(logits, top_k, strict=True)]
    )


def top_k_renorm_probs(probs, top_k):
    kept = torch.stack([p * (p >= p.topk(int(k)).values[-1]) for p, k in zip(probs, top_k, strict=True)])
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm_probs(probs, top_p, *, is_deterministic):
    assert is_deterministic
    ranked, order = probs.sort(-1, descending=True)
    before = ranked.double().cumsum(-1) - ranked
    kept = torch.zeros_like(probs).scatter(1, order, ranked * (before < top_p[:, None]))
    return kept / kept.sum(-1, keepdim=True)


def sampling_from_probs(probs, *, seed, offset):
    assert seed.shape == offset.shape == probs.shape[:1]
    generators = [torch.Generator().manual_seed(int(seed[0] * 1009 + offset[0]) + row) for row in range(len(probs))]
    return torch.cat([p.multinomial(1, generator=g) for p, g in zip(probs, generators, strict=True)]).int()


def sampling_from_logits(logits, *, seed, offset):
    return sampling_from_probs(softmax(logits), seed=seed, offset=offset)


def top_k_top_p_sampling_from_probs(probs, top_k, top_p, *, seed, offset):
    kept = top_p_renorm_probs(top_k_renorm_probs(probs, top_k), top_p, is_deterministic=True)
    return sampling_from_probs(kept, seed=seed, offset=offset)


SAMPLING = (
    softmax,
    top_k_mask_logits,
    top_k_renorm_probs,
    top_p_renorm_probs,
    sampling_from_probs,
    sampling_from_logits,
    top_k_top_p_sampling_from_probs,
)
"""In torch; seeds work as in FlashInfer's sources."""


def modules() -> dict[str, ModuleType]:
    """Return the entries of sys.modules."""
    package, decode, mla, sampling = (ModuleType(f"flashinfer{name}") for name in ("", ".decode", ".mla", ".sampling"))
    package.__spec__ = ModuleSpec("flashinfer", None, origin=__file__)
    package.BatchDecodeWithPagedKVCacheWrapper, package.sampling = Decode, sampling
    decode.trtllm_batch_decode_with_kv_cache = None
    mla.BatchMLAPagedAttentionWrapper = Mla
    vars(sampling).update({op.__name__: op for op in SAMPLING})
    return {module.__name__: module for module in (package, decode, mla, sampling)}
