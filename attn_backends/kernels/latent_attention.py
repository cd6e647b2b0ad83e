"""Attention over a paged cache of latents (multi-head latent attention, absorbed form), split over KV tokens.

The absorbed form of the DeepSeek-V2 paper (arXiv:2405.04434, section 2.1): the up-projections of keys and values are
folded into the query and the output, and what remains is attention of all heads over a single KV head.

Shape legend: T query tokens, R requests, H heads, D = V + P latent dim, V value dim, P rotary dims, S splits,
M rows of a tile (query token x head), N KV tokens of a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from attn_backends.kernels.paged_attention import (
    PagedAttentionArguments,
    length_within,
    merge_kernel,
    seen_in_tree,
    split_range,
)
from builders.errors import require
from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from builders.paged import SPLIT_TOKENS

_DIMS = frozenset({16, 32, 64, 128, 256, 512})
_SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a program may have on Hopper."""


class LatentAttentionArguments(NamedTuple):
    """softmax(scale * q . latent) @ latent[:V]; returns [T, H, V] in query's dtype.

    query            [T, H, D] of bf16, fp16 or fp32
    latent_cache     [pages, page_size, D] of query's dtype, strided in all but the last dim
    block_table      int32 [R, max_pages], read only below seq_lens
    seq_lens         int32 [R]; the last query of request r is at position seq_lens[r] - 1; 0 gives rows of 0, and so
                     does one that is negative or beyond the block table
    query_start_loc  int32 [R + 1]; request r's queries are rows query_start_loc[r] .. query_start_loc[r + 1] - 1
    tree_masks       int64 [T], or None: queries are trees, as AttentionBatch has them
    max_query_len    a capture constant, which sizes the launch; so is num_splits
    value_dim        V
    scale            of q.latent
    causal           as of paged attention; so is batch_invariant

    The op raises BatchError unless V and D - V are powers of two from 16 to 512, and for a cache of another
    width or dtype, or with a strided last dim.
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
            {self.value_dim, rotary_dim} <= _DIMS,
            "latent attention needs value dims and rotary dims that are powers of two from 16 to 512, got "
            f"{self.value_dim} and {rotary_dim} of {dim}; the kernel's tiles would not cover them. "
            "Pad the latents.",
        )
        require(
            cache.dtype == self.query.dtype and cache.shape[2] == dim and cache.stride(2) == 1,
            f"the latent cache must be {self.query.dtype} [pages, page_size, {dim}] with a contiguous last dim, got "
            f"{cache.dtype} {list(cache.shape)} with strides {list(cache.stride())}; the kernel would read other "
            "numbers. Convert the cache or the query.",
        )

    @property
    def _longest(self) -> int:
        return self.block_table.shape[1] * self.latent_cache.shape[1]

    def reference(self) -> torch.Tensor:
        """Latents are the keys of the only KV head, and their first V dims its values."""
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
        ).reference()

    def fake(self) -> torch.Tensor:
        return self.query.new_empty(*self.query.shape[:2], self.value_dim)

    def launch(self, config: dict[str, int] | None = None) -> torch.Tensor:
        """config: what tile_config would choose, for a script that tunes it."""
        self._check()
        query, splits, value_dim = self.query, self.num_splits, self.value_dim
        query = query if query.stride(2) == 1 else query.contiguous()
        tokens, heads, dim = query.shape
        interpreted = query.device.type == "cpu"
        # The interpreter truncates fp32 to bf16 where the hardware rounds: let torch do that conversion.
        out_dtype = torch.float32 if interpreted else query.dtype
        out = torch.empty(tokens, heads, value_dim, dtype=out_dtype, device=query.device)
        split = splits > 1
        partial = torch.empty(splits, tokens, heads, value_dim, device=query.device) if split else out
        lse = torch.empty(splits, tokens, heads, device=query.device) if split else out
        fixed = self.batch_invariant
        config = config or tile_config(heads if fixed else self.max_query_len * heads, dim, query.element_size())
        tiles = triton.cdiv(self.max_query_len * heads, config["BLOCK_M"])
        page_size = self.latent_cache.shape[1]
        latent_attention_kernel[(self.seq_lens.shape[0] * tiles, splits)](
            query,
            *self[1:6],
            partial,
            lse,
            self.scale,
            tiles,
            tokens,
            self._longest,
            *query.stride()[:2],
            *self.latent_cache.stride()[:2],
            self.block_table.stride(0),
            HEADS=heads,
            PAGE_SIZE=page_size,
            VALUE_DIM=value_dim,
            ROTARY_DIM=dim - value_dim,
            SPLITS=splits,
            SPLIT_BLOCKS=SPLIT_TOKENS // config["BLOCK_N"] if fixed else 0,
            CAUSAL=self.causal,
            TREE=self.tree_masks is not None,
            WIDE_PAGES=page_size * self.latent_cache.stride(1) >= 1 << 31,
            FP32_DOT=interpreted,
            **config,
            **dependent_launch(query.device),
        )
        if split:
            merge_kernel[(tokens, heads)](
                partial,
                lse,
                None,  # sinks
                out,
                tokens,
                HEADS=heads,
                VALUE_DIM=value_dim,
                BLOCK_E=value_dim,
                SPLITS=splits,
                BLOCK_S=triton.next_power_of_2(splits),
                SINKS=False,
                IN_ORDER=fixed,
                num_warps=merge_warps(1 if fixed else splits, value_dim),
                **dependent_launch(query.device),
            )
        return out.to(query.dtype)


def tile_config(rows: int, dim: int, element_size: int) -> dict[str, int]:
    """Tile, warps and pipeline stages for this many rows a request: the largest block that fits the shared memory.

    Measured on an H200. Up to 16 rows the loads set the pace. More rows than 32 fill the 64 that two warpgroups work
    on; their registers hold no more than 64 rows of the accumulator.
    """
    if element_size == 4:
        block_m, block_n, warps, stages = 16, 16, 8, 2
    elif rows <= 16:
        block_m, block_n, warps, stages = 16, 64, 4, 3
    elif rows <= 32:
        block_m, block_n, warps, stages = 32, 64, 8, 3
    else:
        block_m, block_n, warps, stages = 64, 64, 8, 2
    # Triton keeps a buffer a stage for wgmma, which starts at 64 rows, and one less for mma.
    buffers = stages if block_m == 64 else stages - 1
    while (block_m * (dim + block_n) + buffers * block_n * dim) * element_size > _SHARED_MEMORY:
        block_n //= 2
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps, "num_stages": stages}


def merge_warps(num_splits: int, value_dim: int) -> int:
    """Warps that hold the partial outputs of a row in at most 64 registers a thread, as far as 16 warps go."""
    wanted: int = triton.next_power_of_2(num_splits) * value_dim // (32 * 64)
    return max(1, min(wanted, 16))


latent_attention = define_op("attn_backends::latent_attention", LatentAttentionArguments)


@triton.jit
def latent_attention_kernel(
    query,  # [T, H, D]
    latent_cache,  # [pages, page_size, D]
    block_table,  # int32 [R, max_pages]
    seq_lens,  # int32 [R]
    query_start_loc,  # int32 [R + 1]
    tree_masks,  # int64 [T], or None: which query tokens each one sees
    out,  # out: [T, H, V]; of more than one split fp32 [S, T, H, V]
    lse,  # out: fp32 [S, T, H], log2 of each split's sum of exponentials; not written for one split
    scale,  # of q.latent
    tiles,  # of a request
    tokens,  # T
    longest,  # a length above it counts as 0
    q_token_stride,
    q_head_stride,
    page_stride,
    token_stride,
    table_stride,
    HEADS: tl.constexpr,  # H
    PAGE_SIZE: tl.constexpr,
    VALUE_DIM: tl.constexpr,  # V
    ROTARY_DIM: tl.constexpr,  # P
    BLOCK_M: tl.constexpr,  # M
    BLOCK_N: tl.constexpr,  # N
    SPLITS: tl.constexpr,  # S
    SPLIT_BLOCKS: tl.constexpr,  # blocks of a split; 0 shares them out equally
    CAUSAL: tl.constexpr,
    TREE: tl.constexpr,
    WIDE_PAGES: tl.constexpr,  # whether an offset within a page may need 64 bits
    FP32_DOT: tl.constexpr,  # multiply in fp32, for the interpreter
    PDL: tl.constexpr,
):
    """One program computes M query rows over one split of their request's KV tokens; its grid is [R * tiles, S].

    It keeps a running softmax as `attention_kernel` does, with `total` spread over the N columns of a block until the
    end. The first V dims of a latent serve as key and value, the last P dims as key only.
    """
    await_previous(PDL)
    # The request, tile and split of this program. Tiles of one request are neighbours: they run at the same time and
    # share its latents in the L2 cache.
    request = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    split = tl.program_id(1)
    first = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - first
    if tile * BLOCK_M >= query_len * HEADS:
        return
    seq_len = length_within(tl.load(seq_lens + request), longest)

    # The query token, head and position of each row
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    in_row = row < query_len * HEADS
    token = (first + row // HEADS).to(tl.int64)
    head = row % HEADS
    cached = seq_len - query_len
    position = cached + row // HEADS
    if TREE:
        ancestors = tl.load(tree_masks + token, mask=in_row, other=0)
    value_dim = tl.arange(0, VALUE_DIM)
    rotary_dim = VALUE_DIM + tl.arange(0, ROTARY_DIM)
    at = (split.to(tl.int64) * tokens + token) * HEADS + head

    # The range of KV tokens that any row of this tile sees, and this split's blocks of it. A padding row has no keys:
    # its range ends at 0 or before, and its output is 0.
    last_row = tl.minimum(tile * BLOCK_M + BLOCK_M, query_len * HEADS) - 1
    end = cached + last_row // HEADS + 1
    seen_by_all = cached + (tile * BLOCK_M) // HEADS + 1
    if not CAUSAL:
        end = seq_len
        seen_by_all = seq_len
    if TREE:  # any token may be the root's child, and any may be seen
        end = seq_len
        seen_by_all = cached
    blocks = tl.cdiv(end, BLOCK_N)
    lo, hi = split_range(0, blocks, split, SPLITS, SPLIT_BLOCKS)
    # The loop below runs at least once: on a path around it, ptxas would wait for every single wgmma.
    if lo >= hi:
        if SPLITS > 1:
            tl.store(lse + at, tl.full((BLOCK_M,), float("-inf"), tl.float32), mask=in_row)
        else:
            nothing = tl.zeros((BLOCK_M, VALUE_DIM), out.dtype.element_ty)
            tl.store(out + at[:, None] * VALUE_DIM + value_dim[None, :], nothing, mask=in_row[:, None])
        return

    # The queries, and the running softmax
    q = query + (token * q_token_stride + head.to(tl.int64) * q_head_stride)[:, None]
    q_value = tl.load(q + value_dim[None, :], mask=in_row[:, None], other=0.0)
    q_rotary = tl.load(q + rotary_dim[None, :], mask=in_row[:, None], other=0.0)
    if FP32_DOT:
        q_value = q_value.to(tl.float32)
        q_rotary = q_rotary.to(tl.float32)
    scale *= 1.4426950408889634  # log2(e)
    # Finite, so that a row which sees none of this split's tokens takes no infinity from another.
    peak = tl.full((BLOCK_M,), -3.0e38, tl.float32)
    # Summed over a row after the loop, since a row is spread over several warps.
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = tl.zeros((BLOCK_M, VALUE_DIM), tl.float32)
    table = block_table + request.to(tl.int64) * table_stride
    page = _pages(table, lo, end, PAGE_SIZE, BLOCK_N)
    for block in range(lo, hi):
        # The latents of one block
        kv = block * BLOCK_N + tl.arange(0, BLOCK_N)
        owned = (kv < end)[:, None]
        offset = kv % PAGE_SIZE
        if WIDE_PAGES:  # where this is not needed, it costs up to 9 % of the time
            offset = offset.to(tl.int64)
        latent = latent_cache + (page.to(tl.int64) * page_stride + offset * token_stride)[:, None]
        value = tl.load(latent + value_dim[None, :], mask=owned, other=0.0)
        rotary = tl.load(latent + rotary_dim[None, :], mask=owned, other=0.0)
        # One block ahead, so that no load of latents waits for its page.
        page = _pages(table, block + 1, end, PAGE_SIZE, BLOCK_N)
        if FP32_DOT:
            value = value.to(tl.float32)
            rotary = rotary.to(tl.float32)
        # Their scores. Triton gives a product whose result flows into another product to the warps by rows alone, and
        # two warpgroups would each compute all 64 rows. Neither of these flows on: they are summed after scaling, then
        # branched over.
        scores = tl.dot(q_rotary, tl.trans(rotary), input_precision="ieee") * scale
        scores += tl.dot(q_value, tl.trans(value), input_precision="ieee") * scale
        # Hide what a row does not see; every row sees most blocks whole
        if (block + 1) * BLOCK_N > seen_by_all:
            if TREE:
                seen = seen_in_tree(ancestors[:, None], (kv - cached)[None, :]) & (kv < end)[None, :]
            elif CAUSAL:
                seen = kv[None, :] <= position[:, None]
            else:
                seen = (kv < end)[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        # The running softmax takes the block in
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        fade = tl.exp2(peak - new_peak)
        total = total * fade[:, None] + weights
        acc = tl.dot(weights.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
        peak = new_peak

    sum_exp = tl.sum(total, 1)
    # Divide and store. By equality, so that a NaN is not taken for an empty row, here and in the merge.
    acc = acc / tl.where(sum_exp == 0, 1.0, sum_exp)[:, None]
    to = out + at[:, None] * VALUE_DIM + value_dim[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=in_row[:, None])
    if SPLITS > 1:
        tl.store(lse + at, peak + tl.log2(sum_exp), mask=in_row)


@triton.jit
def _pages(
    table,  # int32 [max_pages], the row of a request
    block,
    end,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The page of every token of a block below `end`; a single number where a block lies within one page."""
    token = block * BLOCK_N
    if PAGE_SIZE % BLOCK_N != 0:
        token += tl.arange(0, BLOCK_N)
    return tl.load(table + token // PAGE_SIZE, mask=token < end, other=0)
