"""What no state enters of a step: the factors between the tokens of a block, and for a delta rule the solved system.

The WY form of arXiv:2412.06464, section 3.3, with a decay per channel as in arXiv:2510.26692. For a block of tokens
with S before it, G_i the sum of log decays on token i's path and rel_ij = exp(G_i - G_j) for j on that path,

    u_i = beta_i (v_i - S^T (exp(G_i) k_i) - sum over j < i of (k_i . rel_ij k_j) u_j)
    out_i = S^T (exp(G_i) q_i) + sum over j <= i of (q_i . rel_ij k_j) u_j

The kernel writes G; solve, with u = solve (v - S^T (exp(G) k)); and score, the factors of u_j in out_i. Without a delta
rule u_i = beta_i v_i, and there is nothing to solve: the quadratic form of arXiv:2405.21060, section 3.2.

Shape legend: T query tokens, R requests, S slots, H key heads, HV value heads, Dk and Dv their dims, C channels of
[q | k | v], G log decays of a value head (1 or Dk), B tokens of a block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from attn_backends.state_kernels.rows import bounded, plan_row
from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


class BlockFactors(NamedTuple):
    """What `launch_tokens` writes: for each token, the row or column of its block.

    solve  fp32 [T, HV, B]: row i; None without a delta rule
    score  fp32 [T, HV, B]: column j
    sums   fp32 [T, HV, G]: G_i
    """

    solve: torch.Tensor | None
    score: torch.Tensor
    sums: torch.Tensor


def launch_tokens(step: Any, block_t: int, shared: dict[str, Any]) -> BlockFactors:
    """Compute the factors in blocks of block_t tokens of a `StateStep`. shared: arguments that are also those of the
    next kernel."""
    tokens, value_heads = step.beta.shape
    score = step.beta.new_empty(tokens, value_heads, block_t)
    solve = score.new_empty(score.shape) if shared["SUBTRACTS"] else None
    factors = BlockFactors(solve, score, step.decay.new_empty(step.decay.shape))
    blocks = cdiv(step.max_query_len, block_t)
    _state_tokens_kernel[(len(step.seq_lens) * blocks, value_heads)](
        solve_ptr=factors.solve,
        score_ptr=factors.score,
        sums_ptr=factors.sums,
        tree_masks_ptr=step.tree_masks,
        num_blocks=blocks,
        BLOCK_K=max(16, next_power_of_2(step.key.shape[3])),
        BLOCK_S=32,
        TREE=step.tree_masks is not None,
        # With one warp, no token's elimination waits for other warps.
        num_warps=(4 if block_t <= 16 else 8) if shared["PER_CHANNEL"] or block_t > 32 else block_t // 16,
        **shared,
        **dependent_launch(step.x.device),
    )
    return factors


@triton.jit
def _state_tokens_kernel(
    mixed_ptr,  # fp32 [T, C]: q, k and v after the convolution
    decay_ptr,  # fp32 [T, HV, G]
    beta_ptr,  # fp32 [T, HV]
    tree_masks_ptr,  # int64 [T], or None
    solve_ptr,  # out: fp32 [T, HV, B]: row i of a block's solve
    score_ptr,  # out: fp32 [T, HV, B]: column j of a block's score
    sums_ptr,  # out: fp32 [T, HV, G]: sums of the log decays of a block's paths
    base_ptr,  # int32 [S]
    held_ptr,  # int32 [S]
    query_start_loc_ptr,  # int32 [R + 1]
    seq_lens_ptr,  # int32 [R]
    slots_ptr,  # int32 [R]
    num_blocks,  # per request
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
    BLOCK_K: tl.constexpr,  # Dk, rounded up to a power of two
    BLOCK_S: tl.constexpr,  # channels of keys that are multiplied at once
    PER_CHANNEL: tl.constexpr,
    SUBTRACTS: tl.constexpr,
    ABSORB: tl.constexpr,
    MAY_FOLD: tl.constexpr,
    TREE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """solve = (I + beta tril(k . rel k))^-1 beta and score = tril(q . rel k). One program per block of a row and value
    head; grid [R * num_blocks, HV]."""
    CHANNELS: tl.constexpr = 2 * HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    DECAYS: tl.constexpr = KEY_DIM if PER_CHANNEL else 1
    BLOCK_G: tl.constexpr = BLOCK_K if PER_CHANNEL else 1
    await_previous(PDL)
    row = tl.program_id(0) // num_blocks
    block = tl.program_id(0) % num_blocks
    value_head = tl.program_id(1)
    q_start, q_len, _, _, _, _, _, _ = plan_row(
        row, base_ptr, held_ptr, query_start_loc_ptr, seq_lens_ptr, slots_ptr, max_seq_len, num_slots, reserve,
        stride_slots, JOURNAL, ABSORB, MAY_FOLD,
    )  # fmt: skip
    count = tl.minimum(q_len - block * BLOCK_T, BLOCK_T)
    if count <= 0:
        return

    # 1. Load q, k [B, Dk] and sum the decays of each path
    i = tl.arange(0, BLOCK_T)
    mask_t = i < count
    first_token = (q_start + block * BLOCK_T).to(tl.int64)
    token = first_token + i
    offs_k = tl.arange(0, BLOCK_K)[None, :]
    offs_g = tl.arange(0, BLOCK_G)[None, :]
    k_head = HEADS + value_head // (VALUE_HEADS // HEADS)
    q_ptrs = mixed_ptr + token[:, None] * CHANNELS + (k_head - HEADS) * KEY_DIM + offs_k
    mask_k = mask_t[:, None] & (offs_k < KEY_DIM)
    q = tl.load(q_ptrs, mask=mask_k, other=0.0)
    k = tl.load(q_ptrs + HEADS * KEY_DIM, mask=mask_k, other=0.0)
    offs = (token[:, None] * VALUE_HEADS + value_head) * DECAYS + offs_g
    mask_g = mask_t[:, None] & (offs_g < DECAYS)
    g = tl.load(decay_ptr + offs, mask=mask_g, other=0.0)
    bound = bounded(g)
    seen = i[None, :] <= i[:, None]
    if TREE:
        masks = tl.load(tree_masks_ptr + token, mask=mask_t, other=0)[:, None]
        on_path = (masks >> i[None, :].to(tl.int64)) & 1 == 1
        seen = seen & (on_path | (i[None, :] == i[:, None]))
    if PER_CHANNEL:
        sums = tl.dot(seen.to(tl.float32), bound, input_precision=PRECISION)
    else:
        sums = tl.sum(tl.where(seen, tl.trans(bound), 0.0), 1)[:, None]
    tl.store(sums_ptr + offs, sums, mask=mask_g)

    # 2. Token after token, eliminate its update from those of the tokens that see it
    places = (token[:, None] * VALUE_HEADS + value_head) * BLOCK_T + i[None, :]
    if PER_CHANNEL or (SUBTRACTS and BLOCK_T > 32):
        solve = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        for j in range(count):
            k_ptrs = mixed_ptr + (first_token + j) * CHANNELS + k_head * KEY_DIM + offs_k
            key = tl.load(k_ptrs, mask=offs_k < KEY_DIM, other=0.0)
            own = i[:, None] == j
            sum_j = tl.sum(tl.where(own, sums, 0.0), 0)[None, :]
            key = key * tl.exp(tl.minimum(sums - sum_j, 0.0))
            sees = tl.max(tl.where(seen & (i[None, :] == j), 1, 0), 1) > 0
            overlap = tl.where(sees & (i > j), tl.sum(k * key, 1), 0.0)
            score = tl.where(sees, tl.sum(q * key, 1), 0.0)
            beta = tl.load(beta_ptr + (first_token + j) * VALUE_HEADS + value_head)
            solved = beta * tl.sum(tl.where(own, solve, 0.0), 0)[None, :]
            solve = tl.where(own, solved, solve - overlap[:, None] * solved)
            tl.store(score_ptr + ((first_token + j) * VALUE_HEADS + value_head) * BLOCK_T + i, score)
        tl.store(solve_ptr + places, solve, mask=mask_t[:, None])
    else:
        # Sums of what lies between two tokens: differences of sums would lose bits after a fast decay.
        between = tl.dot(seen.to(tl.float32), tl.where(tl.trans(seen), 0.0, bound), input_precision=PRECISION)
        of_queries = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
        of_keys = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
        for at in range(0, KEY_DIM, BLOCK_S):
            offs_s = at + tl.arange(0, BLOCK_S)[None, :]
            of_query = mixed_ptr + token[:, None] * CHANNELS + (k_head - HEADS) * KEY_DIM + offs_s
            mask_s = mask_t[:, None] & (offs_s < KEY_DIM)
            query = tl.load(of_query, mask=mask_s, other=0.0)
            key = tl.load(of_query + HEADS * KEY_DIM, mask=mask_s, other=0.0)
            of_queries = tl.dot(query, tl.trans(key), acc=of_queries, input_precision=PRECISION)
            if SUBTRACTS:
                of_keys = tl.dot(key, tl.trans(key), acc=of_keys, input_precision=PRECISION)
        decay = tl.exp(between)
        score_ptrs = score_ptr + (token[None, :] * VALUE_HEADS + value_head) * BLOCK_T + i[:, None]
        tl.store(score_ptrs, tl.where(seen, of_queries * decay, 0.0), mask=mask_t[None, :])
        if SUBTRACTS:
            beta = tl.load(beta_ptr + token * VALUE_HEADS + value_head, mask=mask_t, other=0.0)[:, None]
            factor = tl.where(seen & (i[:, None] > i[None, :]), beta * of_keys * decay, 0.0)
            solve = tl.where(i[:, None] == i[None, :], beta, 0.0)
            for j in range(count):
                solved = tl.sum(tl.where(i[:, None] == j, solve, 0.0), 0)[None, :]
                solve -= tl.sum(tl.where(i[None, :] == j, factor, 0.0), 1)[:, None] * solved
            tl.store(solve_ptr + places, solve, mask=mask_t[:, None])
