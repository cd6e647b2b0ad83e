"""Attention over lists of latents (DeepSeek-V4's sparse MLA): every query token names the cache slots it attends to.

One latent per token is both key and value. Shape legend: T query tokens, H heads, D latent dim, M heads of a program,
N list entries of a block.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from attn_backends.kernels import fp8_ds_mla
from attn_backends.kernels.softmax import softmax_with_sinks
from attn_backends.kernels.sparse_attention_kernels import sparse_attention_kernel
from builders.errors import require, require_tensor
from builders.kernels.op import define_op
from builders.kernels.triton_runtime import dependent_launch, triton

DIMS = (64, 128, 256, 512)
PROGRAMS_AT_ONCE = 132  # the SMs of a Hopper GPU: a program's tile fills one


class SparseAttentionArguments(NamedTuple):
    """Attention of query [T, H, D] over the listed latents; returns [T, H, D] in query's dtype.

    query      [T, H, D]
    cache      [pages, page_size, D] in query's dtype, last dim contiguous; or fp8_ds_mla: uint8
               [pages, page_bytes(page_size)] with D = 512 and bfloat16 queries
    indices    int32 [T, width], slots page * page_size + offset; an entry outside of the cache is skipped
    lens       int32 [T], how many entries of its row a token's list has; entries after them mean nothing
    sinks      fp32 [H]; -inf is none, +inf gives 0
    page_size  of the cache, whose shape may not say it
    scale      of q.k
    batch_invariant  cut by the op's sizes alone: a token's bits are those it has in any batch

    With s_j = scale q.k_j over the listed slots, out = sum e^s_j k_j / (sum e^s_j + e^sink). A token with an empty list
    comes out as exactly 0. The op raises BatchError for tensors that do not fit.
    """

    query: torch.Tensor
    cache: torch.Tensor
    indices: torch.Tensor
    lens: torch.Tensor
    sinks: torch.Tensor | None
    page_size: int
    scale: float
    batch_invariant: bool

    def _check(self) -> None:
        (tokens, heads, dim), indices, lens, device = self.query.shape, self.indices, self.lens, self.query.device
        require(
            dim in DIMS,
            f"the latent dim must be one of {DIMS}, got {dim}; the kernel's tiles do not fit others. "
            "Pad the latents and the query with zeros.",
        )
        if self.sinks is not None:
            require_tensor("sinks", self.sinks, shape=(heads,), dtype=torch.float32, device=device)
        self._check_cache()
        require_tensor("indices", indices, shape=(tokens, None), dtype=torch.int32, device=device)
        require_tensor("lens", lens, shape=(tokens,), dtype=torch.int32, device=device)
        require(
            indices.stride(1) == 1 and lens.is_contiguous(),
            f"indices must be contiguous along a row, and lens as a whole, got strides {indices.stride()} and "
            f"{lens.stride()}; the kernel would read other entries. Slice rows only.",
        )

    def _check_cache(self) -> None:
        query, cache, dim = self.query, self.cache, self.query.shape[2]
        dtype, page = query.dtype, [self.page_size, dim]
        if fp8 := cache.dtype == torch.uint8:
            require(
                dim == fp8_ds_mla.LATENT and dtype == torch.bfloat16,
                f"an fp8_ds_mla cache serves bfloat16 queries of dim {fp8_ds_mla.LATENT}, got {dtype} of dim {dim}"
                "; its bytes mean nothing else. Convert the query or use a cache of its dtype.",
            )
            dtype, page = torch.uint8, [fp8_ds_mla.page_bytes(self.page_size)]
        require_tensor("the latent cache", cache, shape=(None, *page), dtype=dtype, device=query.device)
        require(
            cache.stride(-1) == 1 and not (fp8 and cache.stride(0) % 16),
            "the latent cache must be contiguous in its last dim, and an fp8_ds_mla page must start at a multiple of "
            f"16 bytes, got strides {cache.stride()}; the kernel would read other bytes. Lay the "
            "cache out again.",
        )

    def reference(self) -> torch.Tensor:
        self._check()
        latents, listed = self._listed_latents()
        # Sums of torch depend on the shape: where they must not, each token is attended alone.
        tokens = self.query.shape[0]
        parts = [slice(token, token + 1) for token in range(tokens)] if self.batch_invariant else [slice(tokens)]
        out = self.fake()
        for part in parts:
            scores = torch.matmul(self.query[part].float(), latents[part].transpose(1, 2)) * self.scale
            scores = scores.masked_fill(~listed[part, None], -math.inf)
            weights = softmax_with_sinks(scores, None if self.sinks is None else self.sinks[:, None])
            out[part] = torch.matmul(weights, latents[part]).to(out.dtype)
        return out

    def _listed_latents(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The latents of the lists, fp32 [T, width, D], 0 where an entry names none; and where one does, [T, width]."""
        cache, indices, page_size = self.cache, self.indices, self.page_size
        listed = (torch.arange(indices.shape[1]) < self.lens[:, None]) & (indices >= 0)
        listed &= indices < len(cache) * page_size
        if cache.dtype == torch.uint8:
            slots = torch.where(listed, indices, -1).flatten()
            return fp8_ds_mla.gather_and_dequantise(cache, slots, page_size).float().unflatten(0, indices.shape), listed
        slots = torch.where(listed, indices, 0).long()
        latents = cache[slots // page_size, slots % page_size].float()
        return latents.masked_fill(~listed[..., None], 0.0), listed

    def fake(self) -> torch.Tensor:
        return self.query.new_empty(self.query.shape)

    def launch(self) -> torch.Tensor:
        self._check()
        (tokens, heads, dim), cache = self.query.shape, self.cache
        query = self.query if self.query.stride(2) == 1 else self.query.contiguous()
        interpreted = query.device.type == "cpu"
        # The interpreter truncates fp32 to bf16 where the hardware rounds: let torch do that conversion.
        out = torch.empty(query.shape, dtype=torch.float32 if interpreted else query.dtype, device=query.device)
        width = self.indices.shape[1]
        config = tile_config(1 if self.batch_invariant else tokens, heads, query.element_size(), width)
        sparse_attention_kernel[(tokens, triton.cdiv(heads, config["BLOCK_M"]))](
            query, *self[1:5], out, self.scale * math.log2(math.e), width, len(cache) * self.page_size,
            *query.stride()[:2], self.indices.stride(0), cache.stride(0), cache.stride(-2),
            HEADS=heads, DIM=dim, PAGE_SIZE=self.page_size, FP8_DS_MLA=cache.dtype == torch.uint8,
            SINKS=self.sinks is not None, ONE_BLOCK=width <= config["BLOCK_N"], FP32_DOT=interpreted,
            **config, **dependent_launch(query.device),
        )  # fmt: skip
        return out.to(self.query.dtype)


def tile_config(tokens: int, heads: int, element_size: int, width: int) -> dict[str, int]:
    """Heads M and list entries N of a tile, and which of them come first in the dots (tuned on an H200)."""
    if element_size == 4:
        return {"BLOCK_M": 16, "BLOCK_N": 16, "TOKENS_FIRST": False, "num_warps": 8, "num_stages": 1}
    if width > 128:
        return {"BLOCK_M": 64, "BLOCK_N": 32, "TOKENS_FIRST": False, "num_warps": 8, "num_stages": 1}
    for block_m in (16, 32):
        if heads <= block_m or tokens * triton.cdiv(heads, block_m) <= PROGRAMS_AT_ONCE:
            return {"BLOCK_M": block_m, "BLOCK_N": 128, "TOKENS_FIRST": True, "num_warps": 8, "num_stages": 1}
    return {"BLOCK_M": 64, "BLOCK_N": 128, "TOKENS_FIRST": False, "num_warps": 8, "num_stages": 1}


sparse_attention = define_op("attn_backends::sparse_attention", SparseAttentionArguments)
