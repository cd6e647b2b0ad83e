"""The write of new latents to the paged cache: norm, rotary embedding and store in one kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

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
    latent: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, *, norm_rope: KvANormRope | None = None
) -> None:
    """Set cache[slot // page_size, slot % page_size] = latent, for every token whose slot is in the cache.

    latent        [num_tokens, D]
    cache         [pages, page_size, D] or [pages, page_size, 1, D] in latent's dtype, with any strides but a contiguous
                  last dim
    slot_mapping  int64 [num_tokens]; a slot below 0 or beyond the last page writes nothing
    norm_rope     store norm_rope.apply(latent) instead, rounded once

    Raises BatchError, and writes nothing, for tensors that a kernel would misread.
    """
    tokens, dim = latent.shape
    if cache.dim() == 4 and cache.shape[2] == 1:
        cache = cache.squeeze(2)
    require_tensor("the latent cache", cache, shape=(None, None, dim), dtype=latent.dtype, device=latent.device)
    require(
        cache.stride(-1) == 1,
        f"the last dim of a latent cache must be contiguous, got strides {list(cache.stride())}; a row would overwrite "
        "others. Allocate the cache with its dims last.",
    )
    require_vector("slot_mapping", slot_mapping, length=tokens, dtype=torch.int64, device=cache.device)
    _write_latent_op(latent, cache, slot_mapping, *checked_norm_rope(latent, norm_rope))


_NormRope: TypeAlias = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, float]


def checked_norm_rope(latent: torch.Tensor, norm_rope: KvANormRope | None) -> _NormRope:
    """Return norm_rope as an op's arguments: weight, positions, table and eps. Raises BatchError if it does not fit
    latent."""
    if norm_rope is None:
        return None, None, None, 0.0
    weight, positions, table = norm_rope.weight, norm_rope.positions, norm_rope.table
    require_vector("norm_rope.weight", weight, length=latent.shape[1], dtype=weight.dtype, device=latent.device)
    check_rotary(latent, positions, table)
    return weight, positions, table, norm_rope.eps


def rows_to_write(
    latent: torch.Tensor, slot_mapping: torch.Tensor, num_slots: int, norm_rope: _NormRope
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots that are in the cache, and the latents to store there."""
    written = (slot_mapping >= 0) & (slot_mapping < num_slots)
    slots, latent = slot_mapping[written], latent[written]
    weight, positions, table, eps = norm_rope
    if weight is not None and positions is not None and table is not None:
        latent = KvANormRope(weight=weight, eps=eps, positions=positions[written], table=table).apply(latent)
    return slots, latent


class WriteLatent(NamedTuple):
    """The arguments of `write_latent`."""

    latent: torch.Tensor
    cache: torch.Tensor
    slot_mapping: torch.Tensor
    weight: torch.Tensor | None
    positions: torch.Tensor | None
    table: torch.Tensor | None
    eps: float

    def reference(self) -> None:
        pages, page_size, _ = self.cache.shape
        slots, latent = rows_to_write(self.latent, self.slot_mapping, pages * page_size, self[3:])
        self.cache[slots // page_size, slots % page_size] = latent

    def launch(self) -> None:
        (tokens, dim), (pages, page_size, _) = self.latent.shape, self.cache.shape
        latent = whole_rows(self.latent)
        _write_latent_kernel[(tokens,)](
            latent_ptr=latent,
            kv_cache_ptr=self.cache,
            slot_mapping_ptr=self.slot_mapping,
            weight_ptr=self.weight,
            positions_ptr=self.positions,
            cos_sin_ptr=self.table,
            stride_latent=latent.stride(0),
            stride_kv_page=self.cache.stride(0),
            stride_kv_token=self.cache.stride(1),
            eps=self.eps,
            num_slots=pages * page_size,
            PAGE_SIZE=page_size,
            HEAD_DIM=dim,
            ROTARY=0 if self.table is None else self.table.shape[1],
            BLOCK=next_power_of_2(dim),
            NORM=self.weight is not None,
            num_warps=4,
            **dependent_launch(latent.device),
        )


@triton.jit
def _write_latent_kernel(
    latent_ptr,  # [num_tokens, D]
    kv_cache_ptr,  # out: [pages, page_size, D]
    slot_mapping_ptr,  # int64 [num_tokens]
    weight_ptr,  # [D], or None
    positions_ptr,  # int64 [num_tokens], or None
    cos_sin_ptr,  # fp32 [max_positions, ROTARY], or None
    stride_latent,
    stride_kv_page,
    stride_kv_token,
    eps,  # of the norm
    num_slots,  # pages * page_size
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,  # D
    ROTARY: tl.constexpr,  # number of last dims that are rotated; 0 without a table
    BLOCK: tl.constexpr,  # D, rounded up to a power of two
    NORM: tl.constexpr,  # norm and rotate
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """kv_cache[slot] = latent, or rope(latent / rms(latent) * weight). One program per token."""
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if (slot >= 0) & (slot < num_slots):
        x = load_latent(
            latent_ptr + token * stride_latent, weight_ptr, positions_ptr, cos_sin_ptr, token, eps, HEAD_DIM, ROTARY,
            BLOCK, NORM,
        )  # fmt: skip
        offs_d = tl.arange(0, BLOCK)[None, :]
        page_ptr = kv_cache_ptr + (slot // PAGE_SIZE) * stride_kv_page
        tl.store(page_ptr + (slot % PAGE_SIZE) * stride_kv_token + offs_d, x, mask=offs_d < HEAD_DIM)


@triton.jit
def load_latent(
    latent_ptr,  # [HEAD_DIM], a token's
    weight_ptr,  # [HEAD_DIM], or None
    positions_ptr,  # int64 [num_tokens], or None
    cos_sin_ptr,  # fp32 [max_positions, ROTARY], or None
    token,
    eps,  # of the norm
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK: tl.constexpr,  # HEAD_DIM, rounded up to a power of two
    NORM: tl.constexpr,  # norm and rotate
):
    """Load a latent as [1, BLOCK], in fp32 normed and rotated if NORM, then rounded to its dtype."""
    offs_d = tl.arange(0, BLOCK)[None, :]
    x = tl.load(latent_ptr + offs_d, mask=offs_d < HEAD_DIM, other=0.0)
    if NORM:
        x_fp32 = x.to(tl.float32)
        x_fp32 = x_fp32 * tl.rsqrt(tl.sum(x_fp32 * x_fp32, 1) / HEAD_DIM + eps)[:, None]
        x_fp32 = x_fp32 * tl.load(weight_ptr + offs_d, mask=offs_d < HEAD_DIM, other=0.0).to(tl.float32)
        angles_ptr = cos_sin_ptr + tl.load(positions_ptr + token) * ROTARY
        x = rounded(turn_tail(x_fp32, angles_ptr, HEAD_DIM, ROTARY, False, 1, BLOCK), latent_ptr.dtype.element_ty)
    return x


_write_latent_op = define_op("attn_backends::write_latent", WriteLatent, mutates=("cache",))
