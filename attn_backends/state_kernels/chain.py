"""The matrices of a layer in the step of a chain: entries of the journal, then tokens, one after the other.

For each entry or token, with u from the journal or beta (v - k^T (decay S)), or beta v without a delta rule,

    out = q^T (decay S) + (q . k) u + skip v
    S after = decay S + k u^T

A step has few tokens, and a multiplier of matrices would be mostly empty: in fp32 this takes less time than moving S
between its layouts, and nothing is rounded.

Shape legend: T query tokens, R requests, S slots, J journal entries, H key heads, HV value heads, Dk and Dv their dims,
C channels of [q | k | v], G log decays of a value head (1 or Dk).
"""

from __future__ import annotations

from typing import Any

import torch

from attn_backends.state_kernels.convolution import Convolved
from attn_backends.state_kernels.rows import bounded, plan_row
from builders import Recurrence
from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, stored_as, tl, triton

_STATE_ELEMENTS = 2048
"""Of a state, per program of one warp: 64 registers of a thread, whose sums over a column then need no barrier."""


def launch_chain(step: Any, convolved: Convolved, plan: dict[str, Any]) -> torch.Tensor:
    """Take in the tokens of a `StateStep` without a tree after their convolution; returns [T, HV, Dv] in x's dtype."""
    rule = Recurrence(step.recurrence).rule
    (heads, key_dim), (value_heads, value_dim) = step.key.shape[2:], step.update.shape[2:]
    block_k = next_power_of_2(key_dim)
    block_v = max(1, min(_STATE_ELEMENTS // block_k, next_power_of_2(value_dim)))
    out = stored_as(step.fake())
    _state_chain_kernel[(cdiv(value_dim, block_v), value_heads, len(step.seq_lens))](
        mixed_ptr=convolved.mixed,
        decay_ptr=step.decay,
        beta_ptr=step.beta,
        skip_ptr=step.skip,
        state_ptr=step.state,
        key_ptr=step.key,
        update_ptr=step.update,
        decays_ptr=step.decays,
        replaced_key_ptr=convolved.replaced_key,
        replaced_decays_ptr=convolved.replaced_decays,
        o_ptr=out,
        HEADS=heads,
        VALUE_HEADS=value_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        PER_CHANNEL=rule.decays_by_channel,
        SUBTRACTS=rule.subtracts,
        num_warps=1,
        **{name: value for name, value in plan.items() if name != "ABSORB"},
        **dependent_launch(step.x.device),
    )
    return out.to(step.x.dtype)


@triton.jit
def _state_chain_kernel(
    mixed_ptr,  # fp32 [T, C]: q, k and v after the convolution
    decay_ptr,  # fp32 [T, HV, G]
    beta_ptr,  # fp32 [T, HV]
    skip_ptr,  # fp32 [HV], or None
    state_ptr,  # in and out: fp32 [S, HV, Dk, Dv]
    key_ptr,  # fp32 [S, J, H, Dk]
    update_ptr,  # in and out: fp32 [S, J, HV, Dv]
    decays_ptr,  # fp32 [S, J, HV, G]
    replaced_key_ptr,  # fp32 [R, J, H, Dk]: entries of the journal that a fold has overwritten
    replaced_decays_ptr,  # fp32 [R, J, HV, G]: likewise
    o_ptr,  # out: [T, HV, Dv]
    base_ptr,  # int32 [S]
    held_ptr,  # int32 [S]
    query_start_loc_ptr,  # int32 [R + 1]
    seq_lens_ptr,  # int32 [R]
    slots_ptr,  # int32 [R]
    max_seq_len,
    num_slots,  # S
    reserve,
    stride_slots,
    HEADS: tl.constexpr,  # H
    VALUE_HEADS: tl.constexpr,  # HV
    KEY_DIM: tl.constexpr,  # Dk
    VALUE_DIM: tl.constexpr,  # Dv
    JOURNAL: tl.constexpr,  # J
    BLOCK_K: tl.constexpr,  # Dk, rounded up to a power of two
    BLOCK_V: tl.constexpr,  # columns of the state per program
    PER_CHANNEL: tl.constexpr,
    SUBTRACTS: tl.constexpr,
    MAY_FOLD: tl.constexpr,
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """Replay the journal, take in the row's tokens, and write outputs, the checkpoint of a fold and updates. One
    program per row, value head and BLOCK_V columns of its state; grid [Dv / BLOCK_V, HV, R]."""
    CHANNELS: tl.constexpr = 2 * HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    DECAYS: tl.constexpr = KEY_DIM if PER_CHANNEL else 1
    await_previous(PDL)
    value_head = tl.program_id(1)
    row = tl.program_id(2)
    q_start, q_len, slot, replay, live, fresh, fold, _ = plan_row(
        row, base_ptr, held_ptr, query_start_loc_ptr, seq_lens_ptr, slots_ptr, max_seq_len, num_slots, reserve,
        stride_slots, JOURNAL, False, MAY_FOLD,
    )  # fmt: skip
    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < VALUE_DIM
    o_ptr += (q_start.to(tl.int64) * VALUE_HEADS + value_head) * VALUE_DIM + offs_v
    if live == 0:
        # 1. A row that is padding or lost outputs 0
        q_len = tl.load(query_start_loc_ptr + row + 1) - q_start
        for _token in range(q_len):
            tl.store(o_ptr, tl.zeros((BLOCK_V,), o_ptr.dtype.element_ty), mask=mask_v)
            o_ptr += VALUE_HEADS * VALUE_DIM
        return

    # 2. Load the checkpoint [Dk, BLOCK_V], and replay the journal
    offs_k = tl.arange(0, BLOCK_K)
    mask_k = offs_k < KEY_DIM
    offs_g = offs_k if PER_CHANNEL else offs_k * 0
    k_head = value_head // (VALUE_HEADS // HEADS)
    state_ptrs = state_ptr + (slot * VALUE_HEADS + value_head) * (KEY_DIM * VALUE_DIM)
    state_ptrs += offs_k[:, None] * VALUE_DIM + offs_v[None, :]
    mask = mask_k[:, None] & mask_v[None, :]
    state = tl.load(state_ptrs, mask=mask & (fresh == 0), other=0.0)
    key_ptr += slot * (JOURNAL * HEADS * KEY_DIM)
    decays_ptr += slot * (JOURNAL * VALUE_HEADS * DECAYS)
    if MAY_FOLD:
        key_ptr = tl.where(fold, replaced_key_ptr + row.to(tl.int64) * (JOURNAL * HEADS * KEY_DIM), key_ptr)
        replaced = replaced_decays_ptr + row.to(tl.int64) * (JOURNAL * VALUE_HEADS * DECAYS)
        decays_ptr = tl.where(fold, replaced, decays_ptr)
    key_ptr += k_head * KEY_DIM + offs_k
    decays_ptr += value_head * DECAYS + offs_g
    update_ptr += slot * (JOURNAL * VALUE_HEADS * VALUE_DIM) + value_head * VALUE_DIM + offs_v
    # What the next entry or token needs is loaded while one is taken in.
    k = tl.load(key_ptr, mask=mask_k & (replay > 0), other=0.0)
    g = tl.load(decays_ptr, mask=mask_k & (replay > 0), other=0.0)
    u = tl.load(update_ptr, mask=mask_v & (replay > 0), other=0.0)
    for entry in range(replay):
        later = entry + 1
        more = later < replay
        next_k = tl.load(key_ptr + later * (HEADS * KEY_DIM), mask=mask_k & more, other=0.0)
        next_g = tl.load(decays_ptr + later * (VALUE_HEADS * DECAYS), mask=mask_k & more, other=0.0)
        next_u = tl.load(update_ptr + later * (VALUE_HEADS * VALUE_DIM), mask=mask_v & more, other=0.0)
        state = state * tl.exp(bounded(g))[:, None] + k[:, None] * u[None, :]
        k, g, u = next_k, next_g, next_u
    if fold:
        tl.store(state_ptrs, state, mask=mask)

    # 3. The tokens
    q_ptrs = mixed_ptr + q_start.to(tl.int64) * CHANNELS + k_head * KEY_DIM + offs_k
    v_ptrs = mixed_ptr + q_start.to(tl.int64) * CHANNELS + 2 * HEADS * KEY_DIM + value_head * VALUE_DIM + offs_v
    beta_ptr += q_start.to(tl.int64) * VALUE_HEADS + value_head
    decay_ptr += (q_start.to(tl.int64) * VALUE_HEADS + value_head) * DECAYS + offs_g
    if skip_ptr is not None:
        skip = tl.load(skip_ptr + value_head)
    update_ptr += tl.where(fold, 0, replay) * (VALUE_HEADS * VALUE_DIM)
    # A live row has a token.
    q = tl.load(q_ptrs, mask=mask_k, other=0.0)
    k = tl.load(q_ptrs + HEADS * KEY_DIM, mask=mask_k, other=0.0)
    v = tl.load(v_ptrs, mask=mask_v, other=0.0)
    g = tl.load(decay_ptr, mask=mask_k, other=0.0)
    beta = tl.load(beta_ptr)
    for token in range(q_len):
        later = token + 1
        more = later < q_len
        next_q = tl.load(q_ptrs + later * CHANNELS, mask=mask_k & more, other=0.0)
        next_k = tl.load(q_ptrs + HEADS * KEY_DIM + later * CHANNELS, mask=mask_k & more, other=0.0)
        next_v = tl.load(v_ptrs + later * CHANNELS, mask=mask_v & more, other=0.0)
        next_g = tl.load(decay_ptr + later * (VALUE_HEADS * DECAYS), mask=mask_k & more, other=0.0)
        next_beta = tl.load(beta_ptr + later * VALUE_HEADS, mask=more, other=0.0)
        decay = tl.exp(bounded(g))
        o = tl.sum(state * (q * decay)[:, None], 0)
        u = v
        if SUBTRACTS:
            u = v - tl.sum(state * (k * decay)[:, None], 0)
        u = beta * u
        state = state * decay[:, None] + k[:, None] * u[None, :]
        o += tl.sum(q * k, 0) * u
        if skip_ptr is not None:
            o += skip * v
        tl.store(o_ptr + token * (VALUE_HEADS * VALUE_DIM), o, mask=mask_v)
        tl.store(update_ptr + token * (VALUE_HEADS * VALUE_DIM), u, mask=mask_v)
        q, k, v, g, beta = next_q, next_k, next_v, next_g, next_beta
