"""The write of new latents to an fp8_ds_mla cache: norm, rotary embedding, quantisation and store in one kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attn_backends.kernels import fp8_ds_mla
from attn_backends.kernels.e4m3 import e4m3_byte
from attn_backends.kernels.write_latent import KvANormRope, checked_norm_rope, load_latent, rows_to_write
from builders.errors import BatchError, require_tensor, require_vector
from builders.kernels.op import define_op
from builders.kernels.rows import whole_rows
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


def write_fp8_ds_mla(
    latent: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    page_size: int,
    norm_rope: KvANormRope | None = None,
) -> None:
    """Store every token whose slot is in the cache at cache[slot // page_size], in fp8_ds_mla.py's format.

    latent        bfloat16 [num_tokens, LATENT]
    cache         uint8 [pages, page_bytes(page_size)], with any stride between pages
    slot_mapping  int64 [num_tokens]; a slot below 0 or beyond the last page writes nothing
    norm_rope     store norm_rope.apply(latent) instead, rounded to bfloat16 once before it is quantised

    Raises BatchError, and writes nothing, for tensors that a kernel would misread.
    """
    tokens, device, page = latent.shape[0], cache.device, fp8_ds_mla.page_bytes(page_size)
    require_tensor("latent", latent, shape=(tokens, fp8_ds_mla.LATENT), dtype=torch.bfloat16, device=device)
    require_tensor("the fp8_ds_mla cache", cache, shape=(None, page), dtype=torch.uint8, device=device)
    if cache.stride(1) != 1:
        raise BatchError(
            f"the bytes of an fp8_ds_mla page must be adjacent, got strides {cache.stride()}; its tokens could not be "
            "found. Slice pages only."
        )
    require_vector("slot_mapping", slot_mapping, length=tokens, dtype=torch.int64, device=device)
    _write_fp8_ds_mla(latent, cache, slot_mapping, *checked_norm_rope(latent, norm_rope), page_size)


class WriteFp8DsMla(NamedTuple):
    """The arguments of `write_fp8_ds_mla`."""

    latent: torch.Tensor
    cache: torch.Tensor
    slot_mapping: torch.Tensor
    weight: torch.Tensor | None
    positions: torch.Tensor | None
    table: torch.Tensor | None
    eps: float
    page_size: int

    def reference(self) -> None:
        num_slots = self.cache.shape[0] * self.page_size
        slots, latent = rows_to_write(self.latent, self.slot_mapping, num_slots, self[3:7])
        fp8_ds_mla.quantise_and_insert(latent, self.cache, slots, self.page_size)

    def launch(self) -> None:
        latent = whole_rows(self.latent)
        _write_fp8_ds_mla_kernel[(latent.shape[0],)](
            latent_ptr=latent,
            kv_cache_ptr=self.cache,
            slot_mapping_ptr=self.slot_mapping,
            weight_ptr=self.weight,
            positions_ptr=self.positions,
            cos_sin_ptr=self.table,
            stride_latent=latent.stride(0),
            stride_kv_page=self.cache.stride(0),
            eps=self.eps,
            num_slots=self.cache.shape[0] * self.page_size,
            PAGE_SIZE=self.page_size,
            ROTARY=0 if self.table is None else self.table.shape[1],
            NORM=self.weight is not None,
            TILE=fp8_ds_mla.TILE,
            TILES=fp8_ds_mla.TILES,
            DATA_BYTES=fp8_ds_mla.DATA_BYTES,
            SCALE_BYTES=fp8_ds_mla.SCALE_BYTES,
            num_warps=4,
            **dependent_launch(latent.device),
        )


@triton.jit
def _write_fp8_ds_mla_kernel(
    latent_ptr,  # bf16 [num_tokens, (TILES + 1) * TILE]
    kv_cache_ptr,  # out: uint8 [pages, page_bytes]
    slot_mapping_ptr,  # int64 [num_tokens]
    weight_ptr,  # [(TILES + 1) * TILE], or None
    positions_ptr,  # int64 [num_tokens], or None
    cos_sin_ptr,  # fp32 [max_positions, ROTARY], or None
    stride_latent,
    stride_kv_page,
    eps,  # of the norm
    num_slots,  # pages * page_size
    PAGE_SIZE: tl.constexpr,
    ROTARY: tl.constexpr,  # number of last dims that are rotated; 0 without a table
    NORM: tl.constexpr,  # norm and rotate
    TILE: tl.constexpr,
    TILES: tl.constexpr,  # tiles that are quantised; the last one of a row is not
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """kv_cache[slot] = fp8(latent), or fp8(rope(latent / rms(latent) * weight)). One program per token."""
    FP32_ABS: tl.constexpr = 0x7FFFFFFF  # all bits but the sign
    BITS_SMALLEST_AMAX: tl.constexpr = 0x38D1B717  # as fp32: fp8_ds_mla.SMALLEST_AMAX
    BITS_INF: tl.constexpr = 0x7F800000
    BELOW_QUARTER: tl.constexpr = 0x1FFFFF  # a mantissa's last quarter, less one: beyond 1.75 it carries
    HEAD_DIM: tl.constexpr = (TILES + 1) * TILE
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if (slot >= 0) & (slot < num_slots):
        x = load_latent(
            latent_ptr + token * stride_latent, weight_ptr, positions_ptr, cos_sin_ptr, token, eps, HEAD_DIM, ROTARY,
            HEAD_DIM, NORM,
        )  # fmt: skip
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
        page_ptr = kv_cache_ptr + (slot // PAGE_SIZE) * stride_kv_page
        page_offset = slot % PAGE_SIZE
        data_ptr = page_ptr + page_offset * DATA_BYTES
        offs = tile[:, None] * TILE + lane
        tl.store(data_ptr + offs, e4m3_byte(tiles_fp32 * inverse_scale[:, None]), mask=tile[:, None] < TILES)
        rope_ptr = (data_ptr + TILES * TILE).to(tl.pointer_type(tl.bfloat16))
        tl.store(rope_ptr + offs - TILES * TILE, tiles, mask=tile[:, None] == TILES)
        scale_ptr = page_ptr + PAGE_SIZE * DATA_BYTES + page_offset * SCALE_BYTES
        tl.store(scale_ptr + tile, tl.where(tile < TILES, exponent, 0).to(tl.uint8))


_write_fp8_ds_mla = define_op("attn_backends::write_fp8_ds_mla", WriteFp8DsMla, mutates=("cache",))
