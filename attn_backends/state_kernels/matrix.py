"""The matrices of a layer in a prompt or the step of a tree: the journal is replayed, and the tokens of a block are
taken in at once.

For a block of tokens with S before it, G_i the sum of log decays on token i's path and rel_ij = exp(G_i - G_j) for j
on that path,

    out_i = S^T (exp(G_i) q_i) + sum over j <= i of (q_i . rel_ij k_j) u_j + skip v_i
    S after = exp(G_last) S + sum over j of (rel_last,j k_j) u_j^T

u is what a delta rule's system gives, see `attn_backends.state_kernels.tokens`, and beta v without one. A step is one
block whose u join the journal; a prompt is block after block.

Shape legend: T query tokens, R requests, S slots, J journal entries, H key heads, HV value heads, Dk and Dv their dims,
C channels of [q | k | v], G log decays of a value head (1 or Dk), B tokens of a block.
"""

from __future__ import annotations

from typing import Any

import torch

from attn_backends.state_kernels.convolution import Convolved
from attn_backends.state_kernels.rows import bounded, plan_row
from attn_backends.state_kernels.tokens import launch_tokens
from builders import Recurrence
from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, stored_as, tl, triton

_BLOCK_T, _PROMPT_BLOCK_T = 16, 32
"""Tokens of a block, at least, and of a prompt's if no key channel has a decay of its own and a state has at most 128
rows. Blocks of 64 tokens would need more registers than there are."""
_TILE, _WIDE_TILE = (16, 32), (32, 64)
"""Rows of a slice of the state, and columns per program, which holds its slices in registers; and those where blocks
have 32 tokens and 8 warps, half of which would otherwise repeat the work of the others."""


def launch_matrix(step: Any, convolved: Convolved, plan: dict[str, Any]) -> torch.Tensor:
    """Take in the tokens of a `StateStep` after their convolution; returns [T, HV, Dv] in x's dtype."""
    rule = Recurrence(step.recurrence).rule
    (heads, key_dim), (value_heads, value_dim) = step.key.shape[2:], step.update.shape[2:]
    # A prompt's blocks must not depend on the other prompts of a step.
    prompt_t = _BLOCK_T if rule.decays_by_channel or key_dim > 128 else _PROMPT_BLOCK_T
    block_t = prompt_t if step.absorb else max(_BLOCK_T, next_power_of_2(step.max_query_len))
    block_k, most_v = _WIDE_TILE if block_t == prompt_t == _PROMPT_BLOCK_T else _TILE
    block_v = max(16, min(most_v, next_power_of_2(value_dim)))  # tl.dot needs 16
    shared: dict[str, Any] = {
        "mixed_ptr": convolved.mixed,
        "decay_ptr": step.decay,
        "beta_ptr": step.beta,
        "HEADS": heads,
        "VALUE_HEADS": value_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_T": block_t,
        "PER_CHANNEL": rule.decays_by_channel,
        "SUBTRACTS": rule.subtracts,
        "PRECISION": "ieee" if step.x.device.type == "cpu" else "tf32x3",
        **plan,
    }
    solve, score, sums = launch_tokens(step, block_t, shared)
    out = stored_as(step.fake())
    _state_matrix_kernel[(cdiv(value_dim, block_v), value_heads, len(step.seq_lens))](
        skip_ptr=step.skip,
        solve_ptr=solve,
        score_ptr=score,
        sums_ptr=sums,
        state_ptr=step.state,
        key_ptr=step.key,
        update_ptr=step.update,
        decays_ptr=step.decays,
        replaced_key_ptr=convolved.replaced_key,
        replaced_decays_ptr=convolved.replaced_decays,
        o_ptr=out,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        BLOCK_J=16,
        num_warps=4 if block_t <= 16 and key_dim <= 128 else 8,
        num_stages=1,
        **shared,
        **dependent_launch(step.x.device),
    )
    return out.to(step.x.dtype)


@triton.jit
def load_slice(ptrs, mask, at: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Return columns of rows, [B, BLOCK] from column `at` on; ptrs and mask: [B, 1], to the first column of each row. 0
    where masked and from column DIM on."""
    offs = at + tl.arange(0, BLOCK)[None, :]
    return tl.load(ptrs + offs, mask=mask & (offs < DIM), other=0.0)


@triton.jit
def take_in(
    states,
    k_ptrs,
    g_ptrs,
    mask,
    u,
    KEY_DIM: tl.constexpr,
    DECAYS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the slices [BLOCK_K, Dv] of a state after a chain of tokens, with their keys, log decays and u [B, Dv]."""
    after = ()
    if DECAYS == 1:
        g = bounded(tl.load(g_ptrs, mask=mask, other=0.0))
        total = tl.sum(g, 0)
        # A difference of sums would lose bits after a fast decay, and keys of any norm would show it. A scan of one
        # column does not compile in Triton 3.6.
        i = tl.arange(0, g.shape[0])
        later = tl.sum(tl.where(i[None, :] > i[:, None], tl.trans(g), 0.0), 1)[:, None]
    for at in tl.static_range(len(states)):
        if DECAYS > 1:
            g = bounded(load_slice(g_ptrs, mask, at * BLOCK_K, DECAYS, BLOCK_K))
            total = tl.sum(g, 0)
            later = total[None, :] - tl.cumsum(g, 0)
        k = load_slice(k_ptrs, mask, at * BLOCK_K, KEY_DIM, BLOCK_K) * tl.exp(later)
        state = states[at] * tl.exp(total)[:, None]
        after = after + (tl.dot(tl.trans(k), u, acc=state, input_precision=PRECISION),)  # type: ignore[assignment]
    return after


@triton.jit
def _state_matrix_kernel(
    mixed_ptr,  # fp32 [T, C]: q, k and v after the convolution
    decay_ptr,  # fp32 [T, HV, G]
    beta_ptr,  # fp32 [T, HV]
    skip_ptr,  # fp32 [HV], or None
    solve_ptr,  # fp32 [T, HV, B], or None
    score_ptr,  # fp32 [T, HV, B], transposed
    sums_ptr,  # fp32 [T, HV, G]
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
    BLOCK_T: tl.constexpr,  # B
    BLOCK_K: tl.constexpr,  # rows of a slice of the state
    BLOCK_V: tl.constexpr,  # columns of the state per program
    BLOCK_J: tl.constexpr,  # entries that are replayed at once
    PER_CHANNEL: tl.constexpr,
    SUBTRACTS: tl.constexpr,
    ABSORB: tl.constexpr,
    MAY_FOLD: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """Replay the journal, take in the row's tokens block after block, and write outputs, the checkpoint and updates.
    One program per row, value head and BLOCK_V columns of its state; grid [Dv / BLOCK_V, HV, R]."""
    CHANNELS: tl.constexpr = 2 * HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    DECAYS: tl.constexpr = KEY_DIM if PER_CHANNEL else 1
    SLICES: tl.constexpr = (KEY_DIM + BLOCK_K - 1) // BLOCK_K
    await_previous(PDL)
    value_head = tl.program_id(1)
    row = tl.program_id(2)
    q_start, q_len, slot, replay, live, fresh, fold, _ = plan_row(
        row, base_ptr, held_ptr, query_start_loc_ptr, seq_lens_ptr, slots_ptr, max_seq_len, num_slots, reserve,
        stride_slots, JOURNAL, ABSORB, MAY_FOLD,
    )  # fmt: skip
    i = tl.arange(0, BLOCK_T)
    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    mask_v = offs_v < VALUE_DIM
    if live == 0:
        # 1. A row that is padding or lost outputs 0
        q_len = tl.load(query_start_loc_ptr + row + 1) - q_start
        for start in range(0, q_len, BLOCK_T):
            token = (q_start + start + i).to(tl.int64)[:, None]
            mask = (start + i < q_len)[:, None] & mask_v
            zeros = tl.zeros((BLOCK_T, BLOCK_V), o_ptr.dtype.element_ty)
            tl.store(o_ptr + (token * VALUE_HEADS + value_head) * VALUE_DIM + offs_v, zeros, mask=mask)
        return

    # 2. Load the checkpoint [Dk, Dv] in slices, and replay the journal
    k_head = value_head // (VALUE_HEADS // HEADS)
    rows = tl.arange(0, BLOCK_K)[:, None]
    state_ptrs = state_ptr + ((slot * VALUE_HEADS + value_head) * KEY_DIM + rows) * VALUE_DIM + offs_v
    states = ()
    for at in tl.static_range(SLICES):
        mask_s = (at * BLOCK_K + rows < KEY_DIM) & mask_v & (fresh == 0)
        state = tl.load(state_ptrs + at * BLOCK_K * VALUE_DIM, mask=mask_s, other=0.0)
        states = states + (state,)  # type: ignore[assignment]
    update_ptr += slot * (JOURNAL * VALUE_HEADS * VALUE_DIM) + value_head * VALUE_DIM
    key_ptr += slot * (JOURNAL * HEADS * KEY_DIM)
    decays_ptr += slot * (JOURNAL * VALUE_HEADS * DECAYS)
    if (not ABSORB) and MAY_FOLD:
        key_ptr = tl.where(fold, replaced_key_ptr + row.to(tl.int64) * (JOURNAL * HEADS * KEY_DIM), key_ptr)
        replaced = replaced_decays_ptr + row.to(tl.int64) * (JOURNAL * VALUE_HEADS * DECAYS)
        decays_ptr = tl.where(fold, replaced, decays_ptr)
    for start in range(0, replay, BLOCK_J):
        entry = start + tl.arange(0, BLOCK_J)[:, None]
        mask_j = entry < replay
        k_ptrs = key_ptr + (entry * HEADS + k_head) * KEY_DIM
        g_ptrs = decays_ptr + (entry * VALUE_HEADS + value_head) * DECAYS
        u = tl.load(update_ptr + entry * (VALUE_HEADS * VALUE_DIM) + offs_v, mask=mask_j & mask_v, other=0.0)
        states = take_in(states, k_ptrs, g_ptrs, mask_j, u, KEY_DIM, DECAYS, BLOCK_K, PRECISION)
    if fold & (not ABSORB):
        for at in tl.static_range(SLICES):
            mask_s = (at * BLOCK_K + rows < KEY_DIM) & mask_v
            tl.store(state_ptrs + at * BLOCK_K * VALUE_DIM, states[at], mask=mask_s)

    # 3. The tokens
    for start in range(0, q_len, BLOCK_T):
        mask_t = (start + i < q_len)[:, None]
        token = (q_start + start + i).to(tl.int64)[:, None]
        of_head = token * VALUE_HEADS + value_head
        q_ptrs = mixed_ptr + token * CHANNELS + k_head * KEY_DIM
        k_ptrs = q_ptrs + HEADS * KEY_DIM
        v_ptrs = mixed_ptr + token * CHANNELS + 2 * HEADS * KEY_DIM + value_head * VALUE_DIM + offs_v
        known = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
        o = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
        if DECAYS == 1:
            decayed = tl.exp(tl.load(sums_ptr + of_head, mask=mask_t, other=0.0))
        for at in tl.static_range(SLICES):
            if DECAYS > 1:
                decayed = tl.exp(load_slice(sums_ptr + of_head * DECAYS, mask_t, at * BLOCK_K, DECAYS, BLOCK_K))
            if SUBTRACTS:
                k = load_slice(k_ptrs, mask_t, at * BLOCK_K, KEY_DIM, BLOCK_K) * decayed
            q = load_slice(q_ptrs, mask_t, at * BLOCK_K, KEY_DIM, BLOCK_K) * decayed
            if SUBTRACTS:
                known = tl.dot(k, states[at], acc=known, input_precision=PRECISION)
            o = tl.dot(q, states[at], acc=o, input_precision=PRECISION)
        v = tl.load(v_ptrs, mask=mask_t & mask_v, other=0.0)
        if SUBTRACTS:
            solve = tl.load(solve_ptr + of_head * BLOCK_T + i[None, :], mask=mask_t, other=0.0)
            u = tl.dot(solve, v - known, input_precision=PRECISION)
        else:
            u = v * tl.load(beta_ptr + of_head, mask=mask_t, other=0.0)
        score = tl.load(score_ptr + tl.trans(of_head) * BLOCK_T + i[:, None], mask=tl.trans(mask_t), other=0.0)
        o = tl.dot(score, u, acc=o, input_precision=PRECISION)
        if skip_ptr is not None:
            o += tl.load(skip_ptr + value_head) * v
        tl.store(o_ptr + of_head * VALUE_DIM + offs_v, o, mask=mask_t & mask_v)
        if ABSORB:
            g_ptrs = decay_ptr + of_head * DECAYS
            states = take_in(states, k_ptrs, g_ptrs, mask_t, u, KEY_DIM, DECAYS, BLOCK_K, PRECISION)
        else:
            entry = (tl.where(fold, 0, replay) + i)[:, None]
            mask_u = mask_t & mask_v & (entry < JOURNAL)
            tl.store(update_ptr + entry * (VALUE_HEADS * VALUE_DIM) + offs_v, u, mask=mask_u)
    if ABSORB:
        for at in tl.static_range(SLICES):
            mask_s = (at * BLOCK_K + rows < KEY_DIM) & mask_v
            tl.store(state_ptrs + at * BLOCK_K * VALUE_DIM, states[at], mask=mask_s)
