"""The short convolution before a recurrence: over each row's window and its query tokens, and what a slot keeps of it
and of the decays.

Shape legend: T query tokens, R requests, S slots, J journal entries, H key heads, HV value heads, Dk and Dv their dims,
W the convolution's width, C channels of [q | k | v], G log decays of a value head (1 or Dk). Where nothing is
normalised, a head is any run of channels.
"""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import torch

from attn_backends.state_kernels.rows import plan_row, write_entries
from builders import Recurrence
from builders.kernels.rows import whole_rows
from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, stored_as, tl, triton

_BLOCK_T, _BLOCK_C = 32, 128
"""Tokens of a prompt that a program convolves, and channels of one without a norm, at most."""


class Convolved(NamedTuple):
    """What `launch_convolution` writes, none of it for a row that is not live.

    mixed            fp32 [T, C], with q and k of norm 1 and q scaled if the recurrence normalises. Without matrices, it
                     is what the layer returns: in x's dtype, and 0 in a row that is not live
    replaced_key     fp32 [R, J, H, Dk]: keys that a fold must replay and has overwritten; the journal's if none folds
    replaced_decays  fp32 [R, J, HV, G]: likewise
    """

    mixed: torch.Tensor
    replaced_key: torch.Tensor
    replaced_decays: torch.Tensor


def launch_convolution(step: Any, plan: dict[str, Any]) -> Convolved:
    """Convolve x [T, C] of a `StateStep` with contiguous decay, and write the window and the journal of conv, key and
    decays; see `plan_arguments`."""
    x, key, rule = whole_rows(step.x), step.key, Recurrence(step.recurrence).rule
    keys, num_reqs = key.shape[2] * key.shape[3], len(step.seq_lens)
    values = x.shape[1] - 2 * keys
    # Without a norm, any run of channels is a head.
    key_dim = value_dim = gcd(keys, values, _BLOCK_C)
    if rule.normalises:
        key_dim, value_dim = key.shape[3], step.update.shape[3]
    mixed = x.new_empty(x.shape, dtype=torch.float32) if rule.has_matrix else stored_as(x.new_empty(x.shape))
    replaced_key, replaced_decays = key, step.decays
    if plan["MAY_FOLD"] and not plan["ABSORB"]:
        replaced_key, replaced_decays = (part.new_empty(num_reqs, *part.shape[1:]) for part in (key, step.decays))
    block_t = _BLOCK_T if plan["ABSORB"] else next_power_of_2(step.max_query_len)
    blocks, block_d = cdiv(step.max_query_len, block_t), next_power_of_2(max(key_dim, value_dim))
    heads = 2 * keys // key_dim + values // value_dim
    decays = 0 if plan["ABSORB"] or not rule.has_matrix else step.decays[0, 0].numel()
    _state_convolution_kernel[(num_reqs * blocks, heads + cdiv(decays, block_d))](
        x_ptr=x,
        weight_ptr=step.weight.contiguous(),
        bias_ptr=step.bias,
        tree_masks_ptr=step.tree_masks,
        mixed_ptr=mixed,
        conv_ptr=step.conv,
        key_ptr=key,
        replaced_key_ptr=replaced_key,
        decay_ptr=step.decay,
        decays_ptr=step.decays,
        replaced_decays_ptr=replaced_decays,
        q_scale=key_dim**-0.5,
        num_blocks=blocks,
        stride_x=x.stride(0),
        HEADS=keys // key_dim,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        CHANNELS=x.shape[1],
        DECAYS=decays,
        WIDTH=step.weight.shape[1],
        BLOCK_T=block_t,
        BLOCK_D=block_d,
        BLOCK_W=next_power_of_2(step.weight.shape[1] - 1),
        ACTIVATES=rule.activates,
        NORMALISES=rule.normalises,
        RETURNS=not rule.has_matrix,
        TREE=step.tree_masks is not None,
        num_warps=max(1, min(8, block_t * block_d // 1024)),
        **plan,
        **dependent_launch(x.device),
    )
    return Convolved(mixed, replaced_key, replaced_decays)


@triton.jit
def _state_convolution_kernel(
    x_ptr,  # [T, C]
    weight_ptr,  # [C, W]
    bias_ptr,  # [C], or None
    tree_masks_ptr,  # int64 [T], or None
    mixed_ptr,  # out: [T, C]
    conv_ptr,  # in and out: [S, W - 1 + J, C]
    key_ptr,  # in and out: fp32 [S, J, H, Dk]
    replaced_key_ptr,  # out: fp32 [R, J, H, Dk]
    decay_ptr,  # fp32 [T, HV, G]
    decays_ptr,  # in and out: fp32 [S, J, HV, G]
    replaced_decays_ptr,  # out: fp32 [R, J, HV, G]
    base_ptr,  # int32 [S]
    held_ptr,  # int32 [S]
    query_start_loc_ptr,  # int32 [R + 1]
    seq_lens_ptr,  # int32 [R]
    slots_ptr,  # int32 [R]
    q_scale,
    num_blocks,  # per request
    max_seq_len,
    num_slots,  # S
    reserve,
    stride_x,
    stride_slots,
    HEADS: tl.constexpr,  # H
    KEY_DIM: tl.constexpr,  # Dk
    VALUE_DIM: tl.constexpr,  # Dv
    CHANNELS: tl.constexpr,  # C
    DECAYS: tl.constexpr,  # HV * G that the journal takes, or 0
    WIDTH: tl.constexpr,  # W
    JOURNAL: tl.constexpr,  # J
    BLOCK_T: tl.constexpr,  # tokens per program; all of a row unless ABSORB
    BLOCK_D: tl.constexpr,  # max(Dk, Dv), rounded up to a power of two
    BLOCK_W: tl.constexpr,  # W - 1, likewise
    ACTIVATES: tl.constexpr,
    NORMALISES: tl.constexpr,
    RETURNS: tl.constexpr,  # whether mixed is what the layer returns
    ABSORB: tl.constexpr,
    MAY_FOLD: tl.constexpr,
    TREE: tl.constexpr,
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """mixed = SiLU(convolution of x after the slot's window), and norm 1 for q and k, where a recurrence has them. One
    program per BLOCK_T tokens of a row and head of [q | k | v], or BLOCK_D decays; grid [R * num_blocks, heads +
    DECAYS / BLOCK_D]."""
    NORM_EPS: tl.constexpr = 1e-6
    await_previous(PDL)
    row = tl.program_id(0) // num_blocks
    block = tl.program_id(0) % num_blocks
    head = tl.program_id(1)
    q_start, q_len, slot, replay, live, fresh, fold, _ = plan_row(
        row, base_ptr, held_ptr, query_start_loc_ptr, seq_lens_ptr, slots_ptr, max_seq_len, num_slots, reserve,
        stride_slots, JOURNAL, ABSORB, MAY_FOLD,
    )  # fmt: skip
    if (live == 0) & RETURNS:
        token = (q_start + block * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
        offs_c = head * VALUE_DIM + tl.arange(0, BLOCK_D)[None, :]
        mask = (token < tl.load(query_start_loc_ptr + row + 1)) & (offs_c < (head + 1) * VALUE_DIM)
        zeros = tl.zeros((BLOCK_T, BLOCK_D), mixed_ptr.dtype.element_ty)
        tl.store(mixed_ptr + token * CHANNELS + offs_c, zeros, mask=mask)
    if block * BLOCK_T >= q_len:
        return
    first = tl.where(fold, 0, replay)
    if DECAYS:
        heads = 2 * HEADS + (CHANNELS - 2 * HEADS * KEY_DIM) // VALUE_DIM
        if head >= heads:
            # The decays of the journal
            at = (head - heads) * BLOCK_D
            offs_t = tl.arange(0, BLOCK_T)[:, None]
            offs_g = at + tl.arange(0, BLOCK_D)[None, :]
            g_ptrs = decay_ptr + (q_start + offs_t).to(tl.int64) * DECAYS + offs_g
            g = tl.load(g_ptrs, mask=(offs_t < q_len) & (offs_g < DECAYS), other=0.0)
            write_entries(
                g,
                decays_ptr + slot * (JOURNAL * DECAYS) + at,
                replaced_decays_ptr + row.to(tl.int64) * (JOURNAL * DECAYS) + at,
                first,
                q_len,
                replay,
                fold,
                DECAYS,
                DECAYS - at,
                JOURNAL,
                BLOCK_T,
                BLOCK_D,
            )
            return

    # 1. The channels of this head, and the rows of its slot
    is_value = head >= 2 * HEADS
    dim = tl.where(is_value, VALUE_DIM, KEY_DIM)
    channel = tl.where(is_value, 2 * HEADS * KEY_DIM + (head - 2 * HEADS) * VALUE_DIM, head * KEY_DIM)
    offs_d = channel + tl.arange(0, BLOCK_D)[None, :]
    mask_d = tl.arange(0, BLOCK_D)[None, :] < dim
    place = block * BLOCK_T + tl.arange(0, BLOCK_T)
    mask_t = place < q_len
    x_ptr += q_start.to(tl.int64) * stride_x
    conv_ptr += slot * ((WIDTH - 1 + JOURNAL) * CHANNELS)
    own = tl.load(x_ptr + place.to(tl.int64)[:, None] * stride_x + offs_d, mask=mask_t[:, None] & mask_d, other=0.0)

    # 2. The sum over each token's path; before the row's first token comes the window
    if TREE:
        ancestors = tl.load(tree_masks_ptr + q_start + place, mask=mask_t, other=0)
        ancestors = ancestors & ((tl.full((BLOCK_T,), 1, tl.int64) << place.to(tl.int64)) - 1)
    beyond = tl.zeros((BLOCK_T,), tl.int32)
    newest = tl.load(weight_ptr + offs_d * WIDTH + WIDTH - 1, mask=mask_d, other=0.0)
    mixed = own.to(tl.float32) * newest.to(tl.float32)
    for back in tl.static_range(1, WIDTH):
        if TREE:
            bit = tl.arange(0, BLOCK_T)[None, :]
            place = tl.max(tl.where((ancestors[:, None] >> bit.to(tl.int64)) & 1 == 1, bit, -1), 1)
            last = tl.where(place >= 0, tl.full((BLOCK_T,), 1, tl.int64) << tl.maximum(place, 0).to(tl.int64), 0)
            ancestors = ancestors - last
        else:
            place = place - 1
        beyond = tl.where(place < 0, beyond + 1, 0)
        from_x = mask_t & (place >= 0)
        from_window = mask_t & (place < 0) & (fresh == 0)
        rows = (replay + WIDTH - 1 - beyond)[:, None]
        x_ptrs = x_ptr + place.to(tl.int64)[:, None] * stride_x + offs_d
        known = tl.load(x_ptrs, mask=from_x[:, None] & mask_d, other=0.0).to(tl.float32)
        window = tl.load(conv_ptr + rows * CHANNELS + offs_d, mask=from_window[:, None] & mask_d, other=0.0)
        column = tl.load(weight_ptr + offs_d * WIDTH + WIDTH - 1 - back, mask=mask_d, other=0.0)
        mixed += (known + window.to(tl.float32)) * column.to(tl.float32)
    if bias_ptr is not None:
        mixed += tl.load(bias_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    if ACTIVATES:
        mixed = mixed / (1 + tl.exp(-mixed))
    if NORMALISES:
        norm = tl.rsqrt(tl.sum(mixed * mixed, 1) + NORM_EPS)[:, None]
        mixed = mixed * tl.where(is_value, 1.0, tl.where(head < HEADS, norm * q_scale, norm))
    offs_t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    token = (q_start + offs_t).to(tl.int64)[:, None]
    tl.store(mixed_ptr + token * CHANNELS + offs_d, mixed, mask=mask_t[:, None] & mask_d)

    # 3. The window of the new checkpoint, and the journal: by the program that read the slot's old window
    if block == 0:
        offs_w = tl.arange(0, BLOCK_W)[:, None]
        end = offs_w - (WIDTH - 1)
        if ABSORB:
            end += q_len
        mask_w = (offs_w < WIDTH - 1) & mask_d
        new = tl.load(x_ptr + end.to(tl.int64) * stride_x + offs_d, mask=mask_w & (end >= 0), other=0.0)
        old_ptrs = conv_ptr + (replay + WIDTH - 1 + end) * CHANNELS + offs_d
        old = tl.load(old_ptrs, mask=mask_w & (end < 0) & (fresh == 0), other=0.0)
        # Another thread may still read what this one overwrites.
        tl.debug_barrier()
        tl.store(conv_ptr + offs_w * CHANNELS + offs_d, tl.where(end >= 0, new, old), mask=mask_w & (fold | ABSORB))
        if not ABSORB:
            entry = first + offs_t[:, None]
            mask_entry = mask_t[:, None] & mask_d & (entry < JOURNAL)
            tl.store(conv_ptr + (WIDTH - 1 + entry) * CHANNELS + offs_d, own, mask=mask_entry)
            if (head >= HEADS) & (head < 2 * HEADS):
                at = (head - HEADS) * KEY_DIM
                write_entries(
                    mixed,
                    key_ptr + slot * (JOURNAL * HEADS * KEY_DIM) + at,
                    replaced_key_ptr + row.to(tl.int64) * (JOURNAL * HEADS * KEY_DIM) + at,
                    first,
                    q_len,
                    replay,
                    fold,
                    HEADS * KEY_DIM,
                    KEY_DIM,
                    JOURNAL,
                    BLOCK_T,
                    BLOCK_D,
                )
