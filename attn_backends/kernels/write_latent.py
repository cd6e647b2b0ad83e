"""The write of new latents to the paged cache: norm, rotary embedding, quantisation and store in one kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from attn_backends.kernels import fp8_ds_mla
from attn_backends.kernels.e4m3 import e4m3_byte
from attn_backends.kernels.latent_rotary import check_rotary, rounded, turn_tail, turned
from builders.errors import require, require_tensor, require_vector
from builders.kernels.op import define_op
from builders.kernels.rows import whole_rows
from builders.kernels.sizes import next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


@dataclass(frozen=True, kw_only=True, slots=True)
class KvANormRope:
    """The norm and rotation that turn a projected latent (kv_a) into the cached one.

    weight     [D]
    positions  int64 [num_tokens]
    table      fp32 [max_positions, rotary dims] of cos | sin: see latent_rotary
    """

    weight: torch.Tensor
    eps: float
    positions: torch.Tensor
    table: torch.Tensor

    def apply(self, latent: torch.Tensor) -> torch.Tensor:
        """Norm and rotate latent [num_tokens, ..., D] in fp32, rounded to its dtype once; differentiable."""
        wide = latent.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight.float()
        return turned(wide, self.positions, self.table).to(latent.dtype)


def write_latent(
    latent: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    page_size: int | None = None,
    norm_rope: KvANormRope | None = None,
) -> None:
    """Set cache[slot // page_size, slot % page_size] = latent, for every token whose slot is in the cache.

    latent        [num_tokens, D]
    cache         [pages, page_size, D] or [pages, page_size, 1, D] in latent's dtype, with any strides but a contiguous
                  last dim; or fp8_ds_mla, which takes bfloat16 latents of its fixed D: uint8 [pages, page_size, 1,
                  TOKEN_BYTES] with a page's bytes adjacent, or [pages, page_bytes(page_size)] together with
                  page_size, which that shape does not determine
    slot_mapping  int64 [num_tokens]; a slot below 0 or beyond the last page writes nothing
    norm_rope     store norm_rope.apply(latent) instead, rounded once, before any quantisation

    Raises BatchError, and writes nothing, for tensors that a kernel would misread.
    """
    tokens, dim = latent.shape
    if cache.dim() == 4 and cache.shape[2] == 1:
        cache = cache.squeeze(2)
    if cache.dtype == torch.uint8:
        cache, page_size = _fp8_ds_mla_pages(latent, cache, page_size)
    else:
        shape = (None, page_size, dim)
        require_tensor("the latent cache", cache, shape=shape, dtype=latent.dtype, device=latent.device)
        page_size = cache.shape[1]
    require(
        cache.stride(-1) == 1,
        f"the last dim of a latent cache must be contiguous, got strides {list(cache.stride())}; a row would overwrite "
        "others. Allocate the cache with its dims last.",
    )
    require_vector("slot_mapping", slot_mapping, length=tokens, dtype=torch.int64, device=cache.device)
    if norm_rope is None:
        _write_latent_op(latent, cache, slot_mapping, None, None, None, page_size, 0.0)
        return
    weight, positions, table = norm_rope.weight, norm_rope.positions, norm_rope.table
    require_vector("norm_rope.weight", weight, length=dim, dtype=weight.dtype, device=cache.device)
    check_rotary(latent, positions, table)
    _write_latent_op(latent, cache, slot_mapping, weight, positions, table, page_size, norm_rope.eps)


def _fp8_ds_mla_pages(latent: torch.Tensor, cache: torch.Tensor, page_size: int | None) -> tuple[torch.Tensor, int]:
    """Return the cache as [pages, bytes per page], and its page size."""
    shape = (latent.shape[0], fp8_ds_mla.LATENT)
    require_tensor("latent", latent, shape=shape, dtype=torch.bfloat16, device=cache.device)
    if cache.dim() == 3:
        page_size = cache.shape[1]
        adjacent = cache.shape[2] == fp8_ds_mla.TOKEN_BYTES and (page_size == 1 or cache.stride(1) == cache.shape[2])
    else:
        adjacent = page_size is not None and cache.shape[1:] == (fp8_ds_mla.page_bytes(page_size),)
    require(
        adjacent and page_size is not None,
        f"an fp8_ds_mla cache is [pages, page_size, 1, {fp8_ds_mla.TOKEN_BYTES}] with a page's bytes adjacent, or "
        f"[pages, page_bytes(page_size)] and page_size, got {list(cache.shape)} with strides {list(cache.stride())} "
        f"and page_size {page_size}; its tokens could not be found. Allocate either form.",
    )
    assert page_size is not None
    return cache.view(cache.shape[0], -1), page_size


class _WriteLatent(NamedTuple):
    latent: torch.Tensor
    cache: torch.Tensor
    slot_mapping: torch.Tensor
    weight: torch.Tensor | None
    positions: torch.Tensor | None
    table: torch.Tensor | None
    page_size: int
    eps: float

    def reference(self) -> None:
        cache, page_size = self.cache, self.page_size
        written = (self.slot_mapping >= 0) & (self.slot_mapping < cache.shape[0] * page_size)
        slots, latent = self.slot_mapping[written], self.latent[written]
        if self.weight is not None and self.positions is not None and self.table is not None:
            positions = self.positions[written]
            latent = KvANormRope(weight=self.weight, eps=self.eps, positions=positions, table=self.table).apply(latent)
        if cache.dtype == torch.uint8:
            fp8_ds_mla.quantise_and_insert(latent, cache, slots, page_size)
        else:
            cache[slots // page_size, slots % page_size] = latent

    def launch(self) -> None:
        tokens, dim = self.latent.shape
        latent = whole_rows(self.latent)
        fp8 = self.cache.dtype == torch.uint8
        _write_latent_kernel[(tokens,)](
            latent_ptr=latent,
            kv_cache_ptr=self.cache,
            slot_mapping_ptr=self.slot_mapping,
            weight_ptr=self.weight,
            positions_ptr=self.positions,
            cos_sin_ptr=self.table,
            stride_latent=latent.stride(0),
            stride_kv_page=self.cache.stride(0),
            stride_kv_token=0 if fp8 else self.cache.stride(1),
            eps=self.eps,
            num_slots=self.cache.shape[0] * self.page_size,
            PAGE_SIZE=self.page_size,
            HEAD_DIM=dim,
            ROTARY=0 if self.table is None else self.table.shape[1],
            BLOCK=next_power_of_2(dim),
            NORM=self.weight is not None,
            FP8_DS_MLA=fp8,
            TILE=fp8_ds_mla.TILE,
            TILES=fp8_ds_mla.TILES,
            DATA_BYTES=fp8_ds_mla.DATA_BYTES,
            SCALE_BYTES=fp8_ds_mla.SCALE_BYTES,
            num_warps=4,
            **dependent_launch(latent.device),
        )


@triton.jit
def _write_latent_kernel(
    latent_ptr,  # [num_tokens, D]
    kv_cache_ptr,  # out: [pages, page_size, D]; FP8_DS_MLA: uint8 [pages, page_bytes]
    slot_mapping_ptr,  # int64 [num_tokens]
    weight_ptr,  # [D], or None
    positions_ptr,  # int64 [num_tokens], or None
    cos_sin_ptr,  # fp32 [max_positions, ROTARY], or None
    stride_latent,
    stride_kv_page,
    stride_kv_token,  # not read if FP8_DS_MLA
    eps,  # of the norm
    num_slots,  # pages * page_size
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,  # D
    ROTARY: tl.constexpr,  # number of last dims that are rotated; 0 without a table
    BLOCK: tl.constexpr,  # D, rounded up to a power of two
    NORM: tl.constexpr,  # norm and rotate
    FP8_DS_MLA: tl.constexpr,  # whether that is the cache's format; its constants follow
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """kv_cache[slot] = latent, or rope(latent / rms(latent) * weight), fp8 if FP8_DS_MLA. One program per token."""
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if (slot >= 0) & (slot < num_slots):
        offs_d = tl.arange(0, BLOCK)[None, :]
        x = tl.load(latent_ptr + token * stride_latent + offs_d, mask=offs_d < HEAD_DIM, other=0.0)
        # 1. RMS norm and rotary embedding, in fp32
        if NORM:
            x_fp32 = x.to(tl.float32)
            x_fp32 = x_fp32 * tl.rsqrt(tl.sum(x_fp32 * x_fp32, 1) / HEAD_DIM + eps)[:, None]
            x_fp32 = x_fp32 * tl.load(weight_ptr + offs_d, mask=offs_d < HEAD_DIM, other=0.0).to(tl.float32)
            angles_ptr = cos_sin_ptr + tl.load(positions_ptr + token) * ROTARY
            x = rounded(turn_tail(x_fp32, angles_ptr, HEAD_DIM, ROTARY, False, 1, BLOCK), latent_ptr.dtype.element_ty)
        # 2. Store in the slot
        page_ptr = kv_cache_ptr + (slot // PAGE_SIZE) * stride_kv_page
        page_offset = slot % PAGE_SIZE
        if FP8_DS_MLA:
            _store_fp8_ds_mla(x, page_ptr, page_offset, PAGE_SIZE, TILE, TILES, DATA_BYTES, SCALE_BYTES)
        else:
            tl.store(page_ptr + page_offset * stride_kv_token + offs_d, x, mask=offs_d < HEAD_DIM)


@triton.jit
def _store_fp8_ds_mla(
    x,  # bf16 [1, (TILES + 1) * TILE]
    page_ptr,  # start of the page
    page_offset,  # of the token in the page
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
):
    """Store a row of TILES + 1 tiles, the last of them rotary, at its offset in a page, in fp8_ds_mla.py's format."""
    FP32_ABS: tl.constexpr = 0x7FFFFFFF  # all bits but the sign
    BITS_SMALLEST_AMAX: tl.constexpr = 0x38D1B717  # as fp32: fp8_ds_mla.SMALLEST_AMAX
    BITS_INF: tl.constexpr = 0x7F800000
    BELOW_QUARTER: tl.constexpr = 0x1FFFFF  # a mantissa's last quarter, less one: beyond 1.75 it carries
    # 1. The exponent byte of each tile
    tiles = tl.reshape(x, (TILES + 1, TILE))
    tile = tl.arange(0, TILES + 1)
    lane = tl.arange(0, TILE)[None, :]
    tiles_fp32 = tiles.to(tl.float32)
    magnitude = tiles_fp32.to(tl.int32, bitcast=True) & FP32_ABS
    # Clamped to the bits of infinity: those of a NaN are larger and must not carry into the sign.
    amax_bits = tl.minimum(tl.maximum(tl.max(magnitude, 1), BITS_SMALLEST_AMAX), BITS_INF)
    exponent = ((amax_bits + BELOW_QUARTER) >> 23) - 8
    inverse_scale = ((254 - exponent) << 23).to(tl.float32, bitcast=True)  # 2^(127 - exponent)
    # 2. Store the e4m3 values, the bf16 values and the exponents
    data_ptr = page_ptr + page_offset * DATA_BYTES
    offs = tile[:, None] * TILE + lane
    tl.store(data_ptr + offs, e4m3_byte(tiles_fp32 * inverse_scale[:, None]), mask=tile[:, None] < TILES)
    rope_ptr = (data_ptr + TILES * TILE).to(tl.pointer_type(tl.bfloat16))
    tl.store(rope_ptr + offs - TILES * TILE, tiles, mask=tile[:, None] == TILES)
    scale_ptr = page_ptr + PAGE_SIZE * DATA_BYTES + page_offset * SCALE_BYTES
    tl.store(scale_ptr + tile, tl.where(tile < TILES, exponent, 0).to(tl.uint8))


_write_latent_op = define_op("attn_backends::write_latent", _WriteLatent, mutates=("cache",))
