"""Attention over lists of latents (DeepSeek-V4's sparse MLA): every query token lists the cache slots it attends to.

One latent per token is both key and value. Shape legend: T query tokens, H heads, D latent dim, M heads per program, N
list entries per block.

The cost is the latency of a chain: slots, latents, dot, softmax, dot, store. So a window's list is one block, whose
loads are all in flight at once and whose latents go to shared memory once, for both dots.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from attn_backends.kernels import fp8_ds_mla
from attn_backends.kernels.softmax import softmax_with_sinks
from builders.devices import Room, room_of
from builders.errors import require, require_tensor, require_vector
from builders.kernels.op import define_op
from builders.kernels.rows import whole_rows
from builders.kernels.sizes import cdiv
from builders.kernels.triton_runtime import await_previous, dependent_launch, stored_as, tl, triton

DIMS = (64, 128, 256, 512)


class SparseAttentionArguments(NamedTuple):
    """Attention of query [T, H, D] over the listed latents; returns [T, H, D] in query's dtype.

    query      [T, H, D]
    cache      [pages, page_size, D] in query's dtype, last dim contiguous; or fp8_ds_mla: uint8
               [pages, page_bytes(page_size)] with D = 512 and bfloat16 queries
    indices    int32 [T, width], slots page * page_size + offset; an entry outside the cache is skipped
    lens       int32 [T], the number of valid entries in each row of indices; later entries are ignored
    sinks      fp32 [H]; -inf has no effect, +inf gives 0
    page_size  of the cache; its shape does not always show it
    scale      factor on q.k
    batch_invariant  tile by the op's sizes only: a token has the same bits in any batch

    With s_j = scale q.k_j over the listed slots, out = sum e^s_j k_j / (sum e^s_j + e^sink). A token with an empty list
    gives exactly 0. The op raises BatchError for tensors that do not fit.
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
            require_vector("sinks", self.sinks, length=heads, dtype=torch.float32, device=device)
        self._check_cache()
        require_tensor("indices", indices, shape=(tokens, None), dtype=torch.int32, device=device)
        require_vector("lens", lens, length=tokens, dtype=torch.int32, device=device)
        require(
            indices.stride(1) == 1,
            f"indices must be contiguous along a row, got strides {indices.stride()}; the kernel would read wrong "
            "entries. Slice rows only.",
        )

    def _check_cache(self) -> None:
        query, cache, dim = self.query, self.cache, self.query.shape[2]
        dtype, page = query.dtype, [self.page_size, dim]
        if fp8 := cache.dtype == torch.uint8:
            require(
                dim == fp8_ds_mla.LATENT and dtype == torch.bfloat16,
                f"an fp8_ds_mla cache serves bfloat16 queries of dim {fp8_ds_mla.LATENT}, got {dtype} of dim {dim}; "
                "its bytes have no other meaning. Convert the query or use a cache of its dtype.",
            )
            dtype, page = torch.uint8, [fp8_ds_mla.page_bytes(self.page_size)]
        require_tensor("the latent cache", cache, shape=(None, *page), dtype=dtype, device=query.device)
        require(
            cache.stride(-1) == 1 and not (fp8 and cache.stride(0) % 16),
            "the latent cache must be contiguous in its last dim, and an fp8_ds_mla page must start at a multiple of "
            f"16 bytes, got strides {cache.stride()}; the kernel would read wrong bytes. Allocate it with allocate_kv.",
        )

    def reference(self) -> torch.Tensor:
        self._check()
        latents, listed = self._listed_latents()
        # torch's sums depend on the shape: to be batch invariant, each token is attended separately.
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
        """Return the listed latents, fp32 [T, width, D], 0 where none is listed; and the mask of listed ones, [T,
        width]."""
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
        query = whole_rows(self.query)
        out = stored_as(self.fake())
        width = self.indices.shape[1]
        fp8, rows = cache.dtype == torch.uint8, 1 if self.batch_invariant else tokens
        config = tile_config(rows, heads, query.element_size(), width, room_of(query.device), fp8)
        sparse_attention_kernel[(tokens, cdiv(heads, config["BLOCK_M"]))](
            q_ptr=query,
            kv_cache_ptr=self.cache,
            indices_ptr=self.indices,
            lens_ptr=self.lens,
            sinks_ptr=self.sinks,
            o_ptr=out,
            sm_scale=self.scale * math.log2(math.e),
            width=width,
            num_slots=len(cache) * self.page_size,
            stride_q_token=query.stride(0),
            stride_q_head=query.stride(1),
            stride_indices=self.indices.stride(0),
            stride_kv_page=cache.stride(0),
            stride_kv_token=cache.stride(-2),
            HEADS=heads,
            HEAD_DIM=dim,
            PAGE_SIZE=self.page_size,
            FP8_DS_MLA=fp8,
            HAS_SINKS=self.sinks is not None,
            ONE_BLOCK=width <= config["BLOCK_N"],
            FP32_DOT=query.device.type == "cpu",
            **config,
            **dependent_launch(query.device),
        )
        return out.to(self.query.dtype)


def tile_config(tokens: int, heads: int, element_size: int, width: int, room: Room, fp8: bool) -> dict[str, int]:
    """Choose heads M and list entries N per tile, and which come first in the dots; fp8: of an fp8_ds_mla cache.

    Tuned on an H200. Without wgmma a thread holds its part of both operands in registers, which leaves room for few
    heads and entries.
    """
    if element_size == 4:
        return {"BLOCK_M": 16, "BLOCK_N": 16, "TOKENS_FIRST": False, "num_warps": 8, "num_stages": 1}
    if not room.wgmma:
        # Latents of 8 bits are converted in fp32. Heads and weights take as much as 20 entries.
        entry = DIMS[-1] * (4 if fp8 else element_size)
        block_n = 64 if 64 * entry + 20 * DIMS[-1] * element_size <= room.shared_memory else 32
        return {"BLOCK_M": 16, "BLOCK_N": block_n, "TOKENS_FIRST": False, "num_warps": 8, "num_stages": 1}
    if width > 128:
        return {"BLOCK_M": 64, "BLOCK_N": 32, "TOKENS_FIRST": False, "num_warps": 8, "num_stages": 1}
    for block_m in (16, 32):
        if heads <= block_m or tokens * cdiv(heads, block_m) <= room.num_sms:
            return {"BLOCK_M": block_m, "BLOCK_N": 128, "TOKENS_FIRST": True, "num_warps": 8, "num_stages": 1}
    return {"BLOCK_M": 64, "BLOCK_N": 128, "TOKENS_FIRST": False, "num_warps": 8, "num_stages": 1}


sparse_attention = define_op("attn_backends::sparse_attention", SparseAttentionArguments)


NOPE = tl.constexpr(fp8_ds_mla.NOPE)
TILE = tl.constexpr(fp8_ds_mla.TILE)
DATA_BYTES = tl.constexpr(fp8_ds_mla.DATA_BYTES)
SCALE_BYTES = tl.constexpr(fp8_ds_mla.SCALE_BYTES)


@triton.jit
def sparse_attention_kernel(
    q_ptr,  # [T, H, D]
    kv_cache_ptr,  # [pages, page_size, D]; FP8_DS_MLA: uint8 [pages, page_bytes]
    indices_ptr,  # int32 [T, width], slots
    lens_ptr,  # int32 [T]
    sinks_ptr,  # fp32 [H], or None
    o_ptr,  # out: [T, H, D]
    sm_scale,  # factor on q.k, times log2(e)
    width,  # of a list
    num_slots,  # pages * page_size
    stride_q_token,
    stride_q_head,
    stride_indices,
    stride_kv_page,
    stride_kv_token,  # not read if FP8_DS_MLA
    HEADS: tl.constexpr,  # H
    HEAD_DIM: tl.constexpr,  # D
    PAGE_SIZE: tl.constexpr,
    FP8_DS_MLA: tl.constexpr,  # whether that is the cache's format
    HAS_SINKS: tl.constexpr,
    ONE_BLOCK: tl.constexpr,  # whether a block holds the longest list
    TOKENS_FIRST: tl.constexpr,  # whether a dot's first operand holds the tokens, not the heads
    BLOCK_M: tl.constexpr,  # M
    BLOCK_N: tl.constexpr,  # N
    FP32_DOT: tl.constexpr,  # multiply in fp32, for the interpreter
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """o = softmax(sm_scale q k^T) k over the listed latents k. One program per M heads of a query token.

    Grid [T, ceil(H / M)]. The online softmax is that of `attention_kernel`, with maximum m_i, sum l_i and output acc;
    scores are exponents of 2.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    SINK_LIMIT: tl.constexpr = 1e30
    await_previous(PDL)
    # 1. Load q [M, D]
    token = tl.program_id(0).to(tl.int64)
    offs_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM)
    mask_m = offs_m < HEADS
    q = tl.load(
        q_ptr + token * stride_q_token + offs_m.to(tl.int64)[:, None] * stride_q_head + offs_d[None, :],
        mask=mask_m[:, None],
        other=0.0,
    )
    if FP32_DOT:
        q = q.to(tl.float32)
    # 2. Start the online softmax. A sink is a first token with a weight and no value. Without one, the initial maximum
    # is so far below every score that its weight vanishes, and an empty list needs no special case. A sink of +inf is
    # clamped to a finite maximum, because inf - inf is NaN.
    m_i = tl.full((BLOCK_M,), -SINK_LIMIT, tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + offs_m, mask=mask_m, other=float("-inf"))
        m_i = tl.where(sink > SINK_LIMIT, SINK_LIMIT, tl.maximum(sink * LOG2_E, m_i))
    l_i = tl.full((BLOCK_M,), 1.0, tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    # 3. The list, in one block or several
    kv_len = tl.load(lens_ptr + token)
    indices_ptr += token * stride_indices
    if ONE_BLOCK:
        k, mask_n = _block(
            kv_cache_ptr,
            indices_ptr,
            0,
            kv_len,
            width,
            num_slots,
            stride_kv_page,
            stride_kv_token,
            HEAD_DIM,
            PAGE_SIZE,
            FP8_DS_MLA,
            BLOCK_N,
            FP32_DOT,
        )
        if TOKENS_FIRST:
            # A loop of at most one iteration: a dot's first operand stays in shared memory if a loop carries it, but is
            # copied to registers, which run out, if it was just computed. Triton 3.5 refuses `_` for both the index and
            # the unused alpha: their types differ.
            for _once in tl.range(0, tl.minimum(kv_len, 1)):
                m_i, l_i, _, acc = _attend(q, k, mask_n, kv_len > 0, sm_scale, m_i, l_i, True)
                k = tl.zeros_like(k)
        else:
            m_i, l_i, _, acc = _attend(q, k, mask_n, kv_len > 0, sm_scale, m_i, l_i, False)
    else:
        for n_start in tl.range(0, kv_len, BLOCK_N):
            k, mask_n = _block(
                kv_cache_ptr,
                indices_ptr,
                n_start,
                kv_len,
                width,
                num_slots,
                stride_kv_page,
                stride_kv_token,
                HEAD_DIM,
                PAGE_SIZE,
                FP8_DS_MLA,
                BLOCK_N,
                FP32_DOT,
            )
            m_i, l_i, alpha, pv = _attend(q, k, mask_n, kv_len > 0, sm_scale, m_i, l_i, False)
            acc = acc * alpha[:, None] + pv
    # 4. Divide and store
    acc = acc * (1.0 / l_i)[:, None]
    o_ptrs = o_ptr + (token * HEADS + offs_m)[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(o_ptrs, acc.to(o_ptr.dtype.element_ty), mask=mask_m[:, None])


@triton.jit
def _attend(
    q,  # [M, D]
    k,  # [N, D]
    mask_n,  # bool [N]
    live,  # whether the list has any entry
    sm_scale,
    m_i,  # fp32 [M], the largest score so far
    l_i,  # fp32 [M], the sum of 2^(score - m_i) so far
    TOKENS_FIRST: tl.constexpr,
):
    """One block's step of the online softmax: the new m_i and l_i, the alpha that rescales older sums, and p k [M, D].

    On Hopper a dot's first operand has at least 64 rows: the block's tokens if a program has few heads, else the heads.
    """
    if TOKENS_FIRST:
        qk = tl.trans(tl.dot(k, tl.trans(q), input_precision="ieee"))
    else:
        qk = tl.zeros((q.shape[0], k.shape[0]), tl.float32)
        # The branch hides from the compiler that this dot feeds the next one. It would otherwise give every warp whole
        # rows and, with 64 rows for eight warps, compute all scores twice.
        if live:
            qk = tl.dot(q, tl.trans(k), input_precision="ieee")
    m_ij = tl.maximum(m_i, tl.max(tl.where(mask_n[None, :], qk * sm_scale, float("-inf")), 1))
    # Fused, so that no score is rounded after scaling: large scores would lose more than fp32 should.
    p = tl.exp2(tl.fma(qk, sm_scale, -m_ij[:, None]))
    p = tl.where(mask_n[None, :], p, 0.0)
    alpha = tl.exp2(m_i - m_ij)
    l_i = l_i * alpha + tl.sum(p, 1)
    p = p.to(k.dtype)
    if TOKENS_FIRST:
        pv = tl.trans(tl.dot(tl.trans(k), tl.trans(p), input_precision="ieee"))
    else:
        pv = tl.dot(p, k, input_precision="ieee")
    return m_ij, l_i, alpha, pv


@triton.jit
def _block(
    kv_cache_ptr,  # [pages, page_size, D]; FP8_DS_MLA: uint8 [pages, page_bytes]
    indices_ptr,  # int32 [width], the slots of one list
    n_start,
    kv_len,  # valid entries of the list
    width,
    num_slots,
    stride_kv_page,
    stride_kv_token,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FP8_DS_MLA: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP32_DOT: tl.constexpr,
):
    """Load the latents [N, D] of a list's entries from n_start on, 0 if unlisted, and which of them are listed [N]."""
    offs_n = n_start + tl.arange(0, BLOCK_N)
    # Masked by the width only, so that the slots do not wait for the length.
    slot = tl.load(indices_ptr + offs_n, mask=offs_n < width, other=-1)
    # As unsigned, a negative slot is beyond every pool, and division by a power of two is a shift.
    slot = slot.to(tl.uint32)
    mask_n = (offs_n < kv_len) & (slot < num_slots)
    page_ptr = kv_cache_ptr + (slot // PAGE_SIZE).to(tl.int64) * stride_kv_page
    page_offset = (slot % PAGE_SIZE).to(tl.int64)
    if FP8_DS_MLA:
        k = _fp8_ds_mla_latents(page_ptr, page_offset, mask_n, PAGE_SIZE, BLOCK_N)
    else:
        # In tiles, so that a thread holds many tiles of few rows and computes few addresses.
        tiles = (page_ptr + page_offset * stride_kv_token)[:, None] + (tl.arange(0, HEAD_DIM // TILE) * TILE)[None, :]
        k = tl.load(tiles[:, :, None] + tl.arange(0, TILE)[None, None, :], mask=mask_n[:, None, None], other=0.0)
        k = tl.reshape(k, (BLOCK_N, HEAD_DIM))
    if FP32_DOT:
        k = k.to(tl.float32)
    return k, mask_n


@triton.jit
def _fp8_ds_mla_latents(
    page_ptr,  # start of each entry's page, [N]
    page_offset,  # within the page, int64 [N]
    mask_n,  # bool [N]
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Load latents bfloat16 [N, LATENT] from fp8_ds_mla: tiles of e4m3, each times a power of two, then one of bf16."""
    tile = tl.arange(0, 8)  # LATENT // TILE
    lane = tl.arange(0, TILE)
    rotated = (tile * TILE >= NOPE)[None, :, None]
    # The scale of each tile
    exponents = (page_ptr + PAGE_SIZE * DATA_BYTES + page_offset * SCALE_BYTES)[:, None] + tile[None, :]
    exponents = tl.load(exponents, mask=mask_n[:, None], other=0)
    powers = (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    # The e4m3 tiles, then the bf16 one
    data_ptr = page_ptr + page_offset * DATA_BYTES
    mask_n = mask_n[:, None, None]
    nope = (data_ptr[:, None] + (tile * TILE)[None, :])[:, :, None] + lane[None, None, :]
    nope = tl.load(nope, mask=mask_n & ~rotated, other=0)
    nope = nope.to(tl.float8e4nv, bitcast=True).to(tl.float32) * powers[:, :, None]
    rope = (data_ptr + NOPE).to(tl.pointer_type(tl.bfloat16))[:, None] + (tile * TILE - NOPE)[None, :]
    rope = tl.load(rope[:, :, None] + lane[None, None, :], mask=mask_n & rotated, other=0.0)
    return tl.reshape(tl.where(rotated, rope, nope.to(tl.bfloat16)), (BLOCK_N, 8 * TILE))
