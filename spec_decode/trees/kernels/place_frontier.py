"""Append a frontier to the draft's query tokens, after the frontiers before it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.sizes import next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


class PlaceFrontier(NamedTuple):
    """Write the frontier chosen at step s to places s * W to (s + 1) * W - 1 of Q query tokens per row; in place.

    The query tokens are all frontiers of a round. Those not drafted yet have mask 0, and no token attends to them. Step
    0 starts a round. A frontier past place Q is not written.

    Read:

    - step      int64 [1], s
    - tokens    int64 [rows, W], of the frontier
    - places    int64 [rows, W], for each token, its parent's index on the frontier before; not read at step 0
    - hidden    [rows, 1, H], of the root, at step 0; [rows, Q, H], of the query tokens, later
    - seq_lens  int32 [rows]; a row of 0 is inert

    Written:

    - token_ids   int64 [rows, Q]
    - states      [rows, Q, H] in hidden's dtype, the state of each token's parent
    - positions   int64 [rows, Q]; the first is read at every step: the position of the root's children
    - tree_masks  int64 [rows, Q], in the format of AttentionBatch
    """

    step: torch.Tensor
    tokens: torch.Tensor
    places: torch.Tensor
    hidden: torch.Tensor
    seq_lens: torch.Tensor
    token_ids: torch.Tensor
    states: torch.Tensor
    positions: torch.Tensor
    tree_masks: torch.Tensor

    def reference(self) -> None:
        (rows, width), step = self.tokens.shape, int(self.step)
        if step == 0:
            self.tree_masks.zero_()
            self.positions.copy_(self.positions[:, :1].clone().expand_as(self.positions))
            self.token_ids.zero_()
        at = slice(step * width, (step + 1) * width)
        if at.stop > self.token_ids.shape[1]:
            return
        live = self.seq_lens[:rows, None] > 0
        above = (step - 1) * width + self.places if step else torch.zeros_like(self.places)
        own = torch.tensor([-(2**63) if bit == 63 else 1 << bit for bit in range(at.start, at.stop)])
        inherited = self.tree_masks.gather(1, above) if step else torch.zeros_like(above)
        self.tree_masks[:, at] = torch.where(live, inherited | own, 0)
        self.positions[:, at] = torch.where(live, self.positions[:, :1] + step, 0)
        self.token_ids[:, at] = torch.where(live, self.tokens, 0)
        self.states[:, at] = self.hidden.gather(1, above[..., None].expand(-1, -1, self.hidden.shape[2]))

    def launch(self) -> None:
        (rows, width), hidden = self.tokens.shape, self.hidden
        tokens, size = self.token_ids.shape[1], hidden.shape[2]
        _place_frontier_kernel[(rows, width)](
            step_ptr=self.step,
            tokens_ptr=self.tokens,
            places_ptr=self.places,
            hidden_ptr=self.hidden,
            seq_lens_ptr=self.seq_lens,
            token_ids_ptr=self.token_ids,
            states_ptr=self.states,
            positions_ptr=self.positions,
            tree_masks_ptr=self.tree_masks,
            num_tokens=tokens,
            hidden_size=size,
            stride_hidden_row=hidden.stride(0),
            stride_hidden_token=hidden.stride(1),
            WIDTH=width,
            BLOCK_Q=next_power_of_2(tokens),
            BLOCK_H=min(1024, next_power_of_2(size)),
            num_warps=2,
            **dependent_launch(hidden.device),
        )


@triton.jit
def _place_frontier_kernel(
    step_ptr,  # int64 [1]
    tokens_ptr,  # int64 [rows, W]
    places_ptr,  # int64 [rows, W]
    hidden_ptr,  # [rows, 1, H] at step 0, [rows, Q, H] later
    seq_lens_ptr,  # int32 [>= rows]
    token_ids_ptr,  # out: int64 [rows, Q]
    states_ptr,  # out: [rows, Q, H]
    positions_ptr,  # in and out: int64 [rows, Q]
    tree_masks_ptr,  # in and out: int64 [rows, Q]
    num_tokens,  # Q
    hidden_size,  # H
    stride_hidden_row,
    stride_hidden_token,
    WIDTH: tl.constexpr,  # W
    BLOCK_Q: tl.constexpr,  # Q, rounded up to a power of two
    BLOCK_H: tl.constexpr,  # columns of a state copied per iteration
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """tree_mask[q] = tree_mask[parent] | 1 << q for one frontier token, with its id, position and state.

    Grid [rows, W]. At step 0 the first program of a row also clears the places of later tokens.
    """
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1).to(tl.int64)
    step = tl.load(step_ptr)
    live = tl.load(seq_lens_ptr + row) > 0
    position = tl.load(positions_ptr + row * num_tokens)
    # 1. Start of a round: clear the places that are not drafted yet
    if (step == 0) & (place == 0):
        offs_q = tl.arange(0, BLOCK_Q)
        mask = (offs_q >= WIDTH) & (offs_q < num_tokens)
        tl.store(tree_masks_ptr + row * num_tokens + offs_q, tl.zeros((BLOCK_Q,), tl.int64), mask=mask)
        tl.store(token_ids_ptr + row * num_tokens + offs_q, tl.zeros((BLOCK_Q,), tl.int64), mask=mask)
        tl.store(positions_ptr + row * num_tokens + offs_q, position + tl.zeros((BLOCK_Q,), tl.int64), mask=mask)
    # 2. Place the token, with its parent's mask and state
    q = step * WIDTH + place
    if q < num_tokens:
        parent_q = tl.zeros((), tl.int64)
        tree_mask = tl.zeros((), tl.int64)
        if step > 0:
            parent_q = (step - 1) * WIDTH + tl.load(places_ptr + row * WIDTH + place)
            tree_mask = tl.load(tree_masks_ptr + row * num_tokens + parent_q)
        own_bit = tl.full((), 1, tl.int64) << q
        token = tl.load(tokens_ptr + row * WIDTH + place)
        q_offs = row * num_tokens + q
        tl.store(tree_masks_ptr + q_offs, tl.where(live, tree_mask | own_bit, 0))
        tl.store(positions_ptr + q_offs, tl.where(live, position + step, 0))
        tl.store(token_ids_ptr + q_offs, tl.where(live, token, 0))
        for start in range(0, hidden_size, BLOCK_H):
            offs_h = start + tl.arange(0, BLOCK_H)
            hidden_ptrs = hidden_ptr + row * stride_hidden_row + parent_q * stride_hidden_token + offs_h
            state = tl.load(hidden_ptrs, mask=offs_h < hidden_size)
            tl.store(states_ptr + q_offs * hidden_size + offs_h, state, mask=offs_h < hidden_size)


place_frontier = define_op(
    "spec_decode::place_frontier", PlaceFrontier, mutates=("token_ids", "states", "positions", "tree_masks")
)
