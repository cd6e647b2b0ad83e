"""The peer of a journal: a recurrence that writes the state after each token, so that a rollback is another column.

Shape legend: R requests, Q query tokens of each, H key heads, HV value heads, Dk and Dv their dims, C channels of
[q | k | v], G log decays of a value head (1 or Dk).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, stored_as, tl, triton


class ColumnStates(NamedTuple):
    """Take in Q tokens of each request, and write the state after each; returns [R * Q, HV, Dv] in bf16.

    mixed      fp32 [R * Q, C], after the convolution, and normalised and scaled if the recurrence says so
    decay      fp32 [R * Q, HV, G], log
    beta       fp32 [R * Q, HV]
    skip       fp32 [HV], or None
    states     fp32 [R, 1 + Q, HV, Dk, Dv]: column 0 is read, the others are written
    subtracts  whether the recurrence is a delta rule
    key_heads  H
    block_v    columns of a state per program
    num_warps  of a program
    """

    mixed: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor
    skip: torch.Tensor | None
    states: torch.Tensor
    subtracts: bool
    key_heads: int
    block_v: int
    num_warps: int

    def fake(self) -> torch.Tensor:
        _, _, value_heads, _, value_dim = self.states.shape
        return self.mixed.new_empty(len(self.mixed), value_heads, value_dim, dtype=torch.bfloat16)

    def reference(self) -> torch.Tensor:
        requests, columns, value_heads, key_dim, value_dim = self.states.shape
        keys, queries = self.key_heads * key_dim, columns - 1
        rows = self.mixed.view(requests, queries, -1)
        state = self.states[:, 0]
        decay, outputs = self.decay.view(requests, queries, value_heads, -1, 1), []
        for token in range(queries):
            q, k = (rows[:, token, at : at + keys].view(requests, -1, key_dim, 1) for at in (0, keys))
            q, k = (part.repeat_interleave(value_heads // self.key_heads, 1) for part in (q, k))
            kept = state * decay[:, token].exp()
            v = rows[:, token, 2 * keys :].view(requests, value_heads, value_dim)
            update = v - (k * kept).sum(2) if self.subtracts else v
            state = kept + k * (self.beta.view(requests, queries, -1)[:, token, :, None] * update)[:, :, None]
            self.states[:, 1 + token] = state
            skipped = 0 if self.skip is None else self.skip[:, None] * v
            outputs.append((q * state).sum(2) + skipped)
        return torch.stack(outputs, 1).flatten(0, 1).bfloat16()

    def launch(self) -> torch.Tensor:
        requests, columns, value_heads, key_dim, value_dim = self.states.shape
        out = stored_as(self.fake())
        _column_states_kernel[(cdiv(value_dim, self.block_v), value_heads, requests)](
            mixed_ptr=self.mixed,
            decay_ptr=self.decay,
            beta_ptr=self.beta,
            skip_ptr=self.skip,
            states_ptr=self.states,
            o_ptr=out,
            QUERIES=columns - 1,
            HEADS=self.key_heads,
            VALUE_HEADS=value_heads,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            BLOCK_K=next_power_of_2(key_dim),
            BLOCK_V=self.block_v,
            PER_CHANNEL=self.decay.dim() == 3,
            SUBTRACTS=self.subtracts,
            num_warps=self.num_warps,
            **dependent_launch(self.mixed.device),
        )
        return out.to(torch.bfloat16)


@triton.jit
def _column_states_kernel(
    mixed_ptr,  # fp32 [R * Q, C]
    decay_ptr,  # fp32 [R * Q, HV, G]
    beta_ptr,  # fp32 [R * Q, HV]
    skip_ptr,  # fp32 [HV], or None
    states_ptr,  # in and out: fp32 [R, 1 + Q, HV, Dk, Dv]
    o_ptr,  # out: [R * Q, HV, Dv]
    QUERIES: tl.constexpr,  # Q
    HEADS: tl.constexpr,  # H
    VALUE_HEADS: tl.constexpr,  # HV
    KEY_DIM: tl.constexpr,  # Dk
    VALUE_DIM: tl.constexpr,  # Dv
    BLOCK_K: tl.constexpr,  # Dk, rounded up to a power of two
    BLOCK_V: tl.constexpr,  # columns of a state per program
    PER_CHANNEL: tl.constexpr,
    SUBTRACTS: tl.constexpr,
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """The recurrence, token after token. One program per request, value head and BLOCK_V columns; grid [Dv / BLOCK_V,
    HV, R]."""
    CHANNELS: tl.constexpr = 2 * HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    COLUMN: tl.constexpr = VALUE_HEADS * KEY_DIM * VALUE_DIM
    await_previous(PDL)
    value_head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k = offs_k < KEY_DIM
    mask_v = offs_v < VALUE_DIM
    mask = mask_k[:, None] & mask_v[None, :]
    states_ptr += request * ((1 + QUERIES) * COLUMN) + value_head * (KEY_DIM * VALUE_DIM)
    offs = offs_k[:, None] * VALUE_DIM + offs_v[None, :]
    state = tl.load(states_ptr + offs, mask=mask, other=0.0)
    for at in range(QUERIES):
        token = request * QUERIES + at
        q_ptrs = mixed_ptr + token * CHANNELS + value_head // (VALUE_HEADS // HEADS) * KEY_DIM + offs_k
        q = tl.load(q_ptrs, mask=mask_k, other=0.0)
        k = tl.load(q_ptrs + HEADS * KEY_DIM, mask=mask_k, other=0.0)
        v_ptrs = mixed_ptr + token * CHANNELS + 2 * HEADS * KEY_DIM + value_head * VALUE_DIM + offs_v
        v = tl.load(v_ptrs, mask=mask_v, other=0.0)
        head = token * VALUE_HEADS + value_head
        if PER_CHANNEL:
            state = state * tl.exp(tl.load(decay_ptr + head * KEY_DIM + offs_k, mask=mask_k, other=0.0))[:, None]
        else:
            state = state * tl.exp(tl.load(decay_ptr + head))
        u = v
        if SUBTRACTS:
            u = v - tl.sum(state * k[:, None], 0)
        u = tl.load(beta_ptr + head) * u
        state += k[:, None] * u[None, :]
        o = tl.sum(state * q[:, None], 0)
        if skip_ptr is not None:
            o += tl.load(skip_ptr + value_head) * v
        tl.store(o_ptr + head * VALUE_DIM + offs_v, o, mask=mask_v)
        tl.store(states_ptr + (1 + at) * COLUMN + offs, state, mask=mask)


column_states = define_op("benchmarks::column_states", ColumnStates, mutates=("states",))
