"""Attention over a paged cache of latents (multi-head latent attention, absorbed form), split over KV tokens.

The absorbed form of the DeepSeek-V2 paper (arXiv:2405.04434, section 2.1): the up-projections of keys and values are
folded into the query and the output, which leaves attention of all heads over a single KV head.

Shape legend: T query tokens, R requests, H heads, D = Dv + Dr latent dim, Dv value dim (kv_lora_rank), Dr rotary dims
(qk_rope_head_dim), S splits, M rows per tile (query token x head), N KV tokens per block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from attn_backends.kernels.paged_attention import (
    MERGED_BY_A_WARP,
    PagedAttentionArguments,
    launch_merge,
    length_within,
    seen_in_tree,
    split_range,
)
from builders.devices import Room, room_of
from builders.errors import require
from builders.kernels.op import define_op
from builders.kernels.rows import whole_rows
from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, stored_as, tl, triton
from builders.paged import SPLIT_TOKENS

DIMS = (16, 32, 64, 128, 256, 512)
"""Value dims and rotary dims that the kernel's tiles cover."""


class LatentAttentionArguments(NamedTuple):
    """softmax(scale * q . latent) @ latent[:Dv]; returns [T, H, Dv] in query's dtype.

    query            [T, H, D] of bf16, fp16 or fp32
    latent_cache     [pages, page_size, D] of query's dtype, strided in all but the last dim
    block_table      int32 [R, max_pages], read only below seq_lens
    seq_lens         int32 [R]; the last query of request r is at position seq_lens[r] - 1; 0 gives rows of 0, and so
                     does a length that is negative or beyond the block table
    query_start_loc  int32 [R + 1]; request r's queries are rows query_start_loc[r] .. query_start_loc[r + 1] - 1
    tree_masks       int64 [T], or None: queries are trees, see AttentionBatch
    max_query_len    a capture constant, which sizes the launch; so is num_splits
    value_dim        Dv
    scale            factor on q.latent
    causal           as in paged attention; so is batch_invariant

    The op raises BatchError unless Dv and D - Dv are powers of two from 16 to 512, and for a cache of another width or
    dtype, or with a strided last dim.
    """

    query: torch.Tensor
    latent_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    tree_masks: torch.Tensor | None
    max_query_len: int
    num_splits: int
    value_dim: int
    scale: float
    causal: bool
    batch_invariant: bool

    def _check(self) -> None:
        (*_, dim), cache = self.query.shape, self.latent_cache
        rotary_dim = dim - self.value_dim
        require(
            {self.value_dim, rotary_dim} <= {*DIMS},
            "latent attention needs value dims and rotary dims that are powers of two from 16 to 512, got "
            f"{self.value_dim} and {rotary_dim} of {dim}; the kernel's tiles would not cover them. "
            "Pad the latents.",
        )
        require(
            cache.dtype == self.query.dtype and cache.shape[2] == dim and cache.stride(2) == 1,
            f"the latent cache must be {self.query.dtype} [pages, page_size, {dim}] with a contiguous last dim, got "
            f"{cache.dtype} {list(cache.shape)} with strides {list(cache.stride())}; the kernel would misread it. "
            "Convert the cache or the query.",
        )

    @property
    def _longest(self) -> int:
        return self.block_table.shape[1] * self.latent_cache.shape[1]

    def reference(self) -> torch.Tensor:
        """Run paged attention: latents are the keys of the only KV head, and their first Dv dims its values."""
        self._check()
        latents = self.latent_cache[:, :, None]
        return PagedAttentionArguments(
            self.query,
            latents,
            latents[..., : self.value_dim],
            self.block_table,
            self.seq_lens,
            self.query_start_loc,
            None,  # sinks
            self.tree_masks,
            self.max_query_len,
            self._longest,
            self.num_splits,
            self.scale,
            None,  # sliding_window
            None,  # soft_cap
            self.causal,
            self.batch_invariant,
            None,  # key_scale
            None,  # value_scale
        ).reference()

    def fake(self) -> torch.Tensor:
        return self.query.new_empty(*self.query.shape[:2], self.value_dim)

    def launch(self, config: dict[str, int] | None = None) -> torch.Tensor:
        """config: overrides tile_config's choice, for the tuning script."""
        self._check()
        query, splits, value_dim = whole_rows(self.query), self.num_splits, self.value_dim
        tokens, heads, dim = query.shape
        out = stored_as(self.fake())
        split = splits > 1
        partial = query.new_empty(splits, tokens, heads, value_dim, dtype=torch.float32) if split else out
        lse = query.new_empty(splits, tokens, heads, dtype=torch.float32) if split else out
        invariant = self.batch_invariant
        rows, room = heads if invariant else self.max_query_len * heads, room_of(query.device)
        config = config or tile_config(rows, dim, query.element_size(), room)
        tiles = cdiv(self.max_query_len * heads, config["BLOCK_M"])
        page_size = self.latent_cache.shape[1]
        latent_attention_kernel[(self.seq_lens.shape[0] * tiles, splits)](
            q_ptr=query,
            kv_cache_ptr=self.latent_cache,
            block_table_ptr=self.block_table,
            seq_lens_ptr=self.seq_lens,
            query_start_loc_ptr=self.query_start_loc,
            tree_masks_ptr=self.tree_masks,
            o_ptr=partial,
            lse_ptr=lse,
            sm_scale=self.scale,
            num_m_blocks=tiles,
            num_tokens=tokens,
            max_len=self._longest,
            stride_q_token=query.stride(0),
            stride_q_head=query.stride(1),
            stride_kv_page=self.latent_cache.stride(0),
            stride_kv_token=self.latent_cache.stride(1),
            stride_block_table=self.block_table.stride(0),
            HEADS=heads,
            PAGE_SIZE=page_size,
            VALUE_DIM=value_dim,
            ROTARY_DIM=dim - value_dim,
            NUM_SPLITS=splits,
            SPLIT_BLOCKS=SPLIT_TOKENS // config["BLOCK_N"] if invariant else 0,
            IS_CAUSAL=self.causal,
            TREE=self.tree_masks is not None,
            WIDE_PAGES=page_size * self.latent_cache.stride(1) >= 1 << 31,
            FP32_DOT=query.device.type == "cpu",
            **config,
            **dependent_launch(query.device),
        )
        if split:
            num_warps = merge_warps(1 if invariant else splits, value_dim)
            launch_merge(partial, lse, None, out, in_order=invariant, num_warps=num_warps)
        return out.to(query.dtype)


def tile_config(rows: int, dim: int, element_size: int, room: Room) -> dict[str, int]:
    """Choose tile, warps and pipeline stages for this many rows per request: the largest block that fits shared memory.

    Measured on an H200. Up to 16 rows the loads are the bottleneck. More than 32 rows fill the 64 that two warpgroups
    work on; their registers hold no more than 64 rows of the accumulator, and without warpgroups no more than 32.
    """
    if element_size == 4:
        block_m, block_n, warps, stages = 16, 16, 8, 2
    elif rows <= 16:
        block_m, block_n, warps, stages = 16, 64, 4, 3
    elif rows <= 32 or not room.wgmma:
        block_m, block_n, warps, stages = 32, 64, 8, 3
    else:
        block_m, block_n, warps, stages = 64, 64, 8, 2

    def needed() -> int:
        # Triton keeps one buffer per stage for wgmma, which starts at 64 rows, and one fewer for mma.
        buffers = stages if block_m == 64 else stages - 1
        return (block_m * (dim + block_n) + buffers * block_n * dim) * element_size

    while needed() > room.shared_memory:
        if block_n > 16:
            block_n //= 2
        elif stages > 2:
            stages -= 1
        else:
            block_m //= 2
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps, "num_stages": stages}


def merge_warps(num_splits: int, value_dim: int) -> int:
    """Return the warps that hold a row's partial outputs in at most 64 registers per thread; at most 16."""
    wanted: int = next_power_of_2(num_splits) * value_dim // MERGED_BY_A_WARP
    return max(1, min(wanted, 16))


latent_attention = define_op("attn_backends::latent_attention", LatentAttentionArguments)


@triton.jit
def latent_attention_kernel(
    q_ptr,  # [T, H, D]
    kv_cache_ptr,  # [pages, page_size, D]
    block_table_ptr,  # int32 [R, max_pages]
    seq_lens_ptr,  # int32 [R]
    query_start_loc_ptr,  # int32 [R + 1]
    tree_masks_ptr,  # int64 [T], or None: which query tokens each one sees
    o_ptr,  # out: [T, H, Dv]; with more than one split fp32 [S, T, H, Dv]
    lse_ptr,  # out: fp32 [S, T, H], log2 of each split's sum of exponentials; not written for one split
    sm_scale,  # factor on q.latent
    num_m_blocks,  # per request
    num_tokens,  # T
    max_len,  # a length above it counts as 0
    stride_q_token,
    stride_q_head,
    stride_kv_page,
    stride_kv_token,
    stride_block_table,
    HEADS: tl.constexpr,  # H
    PAGE_SIZE: tl.constexpr,
    VALUE_DIM: tl.constexpr,  # Dv
    ROTARY_DIM: tl.constexpr,  # Dr
    BLOCK_M: tl.constexpr,  # M
    BLOCK_N: tl.constexpr,  # N
    NUM_SPLITS: tl.constexpr,  # S
    SPLIT_BLOCKS: tl.constexpr,  # blocks per split; 0 divides them equally
    IS_CAUSAL: tl.constexpr,
    TREE: tl.constexpr,  # query tokens see each other by tree_masks
    WIDE_PAGES: tl.constexpr,  # whether an offset within a page can need 64 bits
    FP32_DOT: tl.constexpr,  # multiply in fp32, for the interpreter
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """o = softmax(sm_scale q latent^T, masked) latent[:Dv]. One program per M query rows and split of their tokens.

    Grid [R * num_m_blocks, S]. The online softmax is that of `attention_kernel`, except that l_i stays spread over the
    N columns of a block, as l_ij [M, N], until the end. A latent's first Dv dims are key and value, its last Dr dims
    key only.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    M_INIT: tl.constexpr = -3.0e38  # finite: in a row that sees no token of a block, -inf - (-inf) would be NaN
    await_previous(PDL)
    # 1. The request, block of rows and split of this program. Blocks of one request are adjacent: they run at the same
    # time and share its latents in the L2 cache.
    request = tl.program_id(0) // num_m_blocks
    m_block = tl.program_id(0) % num_m_blocks
    split = tl.program_id(1)
    q_start = tl.load(query_start_loc_ptr + request)
    q_len = tl.load(query_start_loc_ptr + request + 1) - q_start
    if m_block * BLOCK_M >= q_len * HEADS:
        return
    seq_len = length_within(tl.load(seq_lens_ptr + request), max_len)

    # 2. The query token, head and position of each row
    offs_m = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < q_len * HEADS
    q_token = (q_start + offs_m // HEADS).to(tl.int64)
    head = offs_m % HEADS
    context_len = seq_len - q_len
    q_pos = context_len + offs_m // HEADS
    if TREE:
        ancestors = tl.load(tree_masks_ptr + q_token, mask=mask_m, other=0)
    offs_dv = tl.arange(0, VALUE_DIM)
    offs_pe = VALUE_DIM + tl.arange(0, ROTARY_DIM)
    row_offs = (split.to(tl.int64) * num_tokens + q_token) * HEADS + head

    # 3. The range of KV tokens visible to any row of this tile, and this split's blocks of it. A padding row has no
    # keys: its range ends at 0 or before, and its output is 0.
    last_row = tl.minimum(m_block * BLOCK_M + BLOCK_M, q_len * HEADS) - 1
    kv_end = context_len + last_row // HEADS + 1
    seen_by_all = context_len + (m_block * BLOCK_M) // HEADS + 1
    if not IS_CAUSAL:
        kv_end = seq_len
        seen_by_all = seq_len
    if TREE:  # any token can be the root's child, and any can be seen
        kv_end = seq_len
        seen_by_all = context_len
    num_n_blocks = tl.cdiv(kv_end, BLOCK_N)
    lo, hi = split_range(0, num_n_blocks, split, NUM_SPLITS, SPLIT_BLOCKS)
    # The loop below must run at least once: if a path bypassed it, ptxas would wait for every single wgmma.
    if lo >= hi:
        if NUM_SPLITS > 1:
            tl.store(lse_ptr + row_offs, tl.full((BLOCK_M,), float("-inf"), tl.float32), mask=mask_m)
        else:
            nothing = tl.zeros((BLOCK_M, VALUE_DIM), o_ptr.dtype.element_ty)
            tl.store(o_ptr + row_offs[:, None] * VALUE_DIM + offs_dv[None, :], nothing, mask=mask_m[:, None])
        return

    # 4. Load q; start the online softmax
    q_ptrs = q_ptr + (q_token * stride_q_token + head.to(tl.int64) * stride_q_head)[:, None]
    q_nope = tl.load(q_ptrs + offs_dv[None, :], mask=mask_m[:, None], other=0.0)
    q_pe = tl.load(q_ptrs + offs_pe[None, :], mask=mask_m[:, None], other=0.0)
    if FP32_DOT:
        q_nope = q_nope.to(tl.float32)
        q_pe = q_pe.to(tl.float32)
    sm_scale *= LOG2_E
    m_i = tl.full((BLOCK_M,), M_INIT, tl.float32)
    # Summed per row after the loop, because a row is spread over several warps.
    l_ij = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = tl.zeros((BLOCK_M, VALUE_DIM), tl.float32)
    table_ptr = block_table_ptr + request.to(tl.int64) * stride_block_table
    page = _pages(table_ptr, lo, kv_end, PAGE_SIZE, BLOCK_N)
    for n_block in range(lo, hi):
        # 5a. Load kv_c [N, Dv] and k_pe [N, Dr] of one block of latents
        offs_n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = (offs_n < kv_end)[:, None]
        page_offset = offs_n % PAGE_SIZE
        if WIDE_PAGES:  # conditional because it costs up to 9 % of the time
            page_offset = page_offset.to(tl.int64)
        kv_ptrs = kv_cache_ptr + (page.to(tl.int64) * stride_kv_page + page_offset * stride_kv_token)[:, None]
        kv_c = tl.load(kv_ptrs + offs_dv[None, :], mask=mask_n, other=0.0)
        k_pe = tl.load(kv_ptrs + offs_pe[None, :], mask=mask_n, other=0.0)
        # Loaded one block ahead, so that no load of latents waits for its page.
        page = _pages(table_ptr, n_block + 1, kv_end, PAGE_SIZE, BLOCK_N)
        if FP32_DOT:
            kv_c = kv_c.to(tl.float32)
            k_pe = k_pe.to(tl.float32)
        # 5b. qk [M, N]. Triton distributes a product that feeds another product over the warps by rows only, and two
        # warpgroups would each compute all 64 rows. Neither of these does: their scaled sum goes through a branch.
        qk = tl.dot(q_pe, tl.trans(k_pe), input_precision="ieee") * sm_scale
        qk += tl.dot(q_nope, tl.trans(kv_c), input_precision="ieee") * sm_scale
        # 5c. Mask the tokens that a row does not see; most blocks are visible to every row
        if (n_block + 1) * BLOCK_N > seen_by_all:
            if TREE:
                qk_mask = seen_in_tree(ancestors[:, None], (offs_n - context_len)[None, :]) & (offs_n < kv_end)[None, :]
            elif IS_CAUSAL:
                qk_mask = offs_n[None, :] <= q_pos[:, None]
            else:
                qk_mask = (offs_n < kv_end)[None, :]
            qk = tl.where(qk_mask, qk, float("-inf"))
        # 5d. p [M, N], and the online softmax's update
        m_ij = tl.maximum(m_i, tl.max(qk, 1))
        p = tl.exp2(qk - m_ij[:, None])
        alpha = tl.exp2(m_i - m_ij)
        l_ij = l_ij * alpha[:, None] + p
        acc = tl.dot(p.to(kv_c.dtype), kv_c, acc * alpha[:, None], input_precision="ieee")
        m_i = m_ij

    # 6. Divide and store. The test is for equality, so that a NaN is not taken for an empty row, here and in the merge.
    l_i = tl.sum(l_ij, 1)
    acc = acc / tl.where(l_i == 0, 1.0, l_i)[:, None]
    o_ptrs = o_ptr + row_offs[:, None] * VALUE_DIM + offs_dv[None, :]
    tl.store(o_ptrs, acc.to(o_ptr.dtype.element_ty), mask=mask_m[:, None])
    if NUM_SPLITS > 1:
        tl.store(lse_ptr + row_offs, m_i + tl.log2(l_i), mask=mask_m)


@triton.jit
def _pages(
    table_ptr,  # int32 [max_pages], the row of a request
    n_block,
    kv_end,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Load the page of every token of a block below kv_end; a single number if a block lies within one page."""
    offs_n = n_block * BLOCK_N
    if PAGE_SIZE % BLOCK_N != 0:
        offs_n += tl.arange(0, BLOCK_N)
    return tl.load(table_ptr + offs_n // PAGE_SIZE, mask=offs_n < kv_end, other=0)
