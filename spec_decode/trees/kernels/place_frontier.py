"""A frontier becomes the next query tokens of the draft, behind the frontiers before it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


class PlaceFrontier(NamedTuple):
    """Writes the frontier chosen at step s to places s * W to (s + 1) * W - 1 of Q query tokens a row; in place.

    The query tokens are all frontiers of a round, and what is not drafted yet: it sees itself not, and no token sees
    it. Step 0 begins a round. A frontier beyond place Q is written nowhere.

    Read:

    - step      int64 [1], s
    - tokens    int64 [rows, W], the frontier's
    - places    int64 [rows, W], on the frontier before, the token that each follows; not read at step 0
    - hidden    [rows, 1, H], of the root, at step 0; [rows, Q, H], of the query tokens, later
    - seq_lens  int32 [rows]; a row of 0 is inert

    Written:

    - token_ids   int64 [rows, Q]
    - states      [rows, Q, H] of hidden's dtype, the state of the token that each follows
    - positions   int64 [rows, Q]; the first is read at every step: where the root's children stand
    - tree_masks  int64 [rows, Q], as AttentionBatch has them
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
            *self,
            tokens,
            size,
            hidden.stride(0),
            hidden.stride(1),
            WIDTH=width,
            QUERIES=triton.next_power_of_2(tokens),
            BLOCK=min(1024, triton.next_power_of_2(size)),
            num_warps=2,
            **dependent_launch(hidden.device),
        )


@triton.jit
def _place_frontier_kernel(
    step,  # int64 [1]
    tokens,  # int64 [rows, W]
    places,  # int64 [rows, W]
    hidden,  # [rows, 1, H] at step 0, [rows, Q, H] later
    seq_lens,  # int32 [>= rows]
    token_ids,  # out: int64 [rows, Q]
    states,  # out: [rows, Q, H]
    positions,  # in and out: int64 [rows, Q]
    tree_masks,  # in and out: int64 [rows, Q]
    num_tokens,  # Q
    size,  # H
    hidden_row_stride,
    hidden_stride,  # of a query token
    WIDTH: tl.constexpr,  # W
    QUERIES: tl.constexpr,  # Q, rounded up to a power of two
    BLOCK: tl.constexpr,  # columns of a state that are copied at a time
    PDL: tl.constexpr,
):
    """One token of a frontier. At step 0 the first of a row also clears the places of later ones."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1).to(tl.int64)
    at_step = tl.load(step)
    live = tl.load(seq_lens + row) > 0
    first = tl.load(positions + row * num_tokens)
    # A round begins: clear what is not drafted yet
    if (at_step == 0) & (place == 0):
        later = tl.arange(0, QUERIES)
        inside = (later >= WIDTH) & (later < num_tokens)
        tl.store(tree_masks + row * num_tokens + later, tl.zeros((QUERIES,), tl.int64), mask=inside)
        tl.store(token_ids + row * num_tokens + later, tl.zeros((QUERIES,), tl.int64), mask=inside)
        tl.store(positions + row * num_tokens + later, first + tl.zeros((QUERIES,), tl.int64), mask=inside)
    # Place the token, with the mask and the state of the one that it follows
    at = at_step * WIDTH + place
    if at < num_tokens:
        above = tl.zeros((), tl.int64)
        mask = tl.zeros((), tl.int64)
        if at_step > 0:
            above = (at_step - 1) * WIDTH + tl.load(places + row * WIDTH + place)
            mask = tl.load(tree_masks + row * num_tokens + above)
        own = tl.full((), 1, tl.int64) << at
        token = tl.load(tokens + row * WIDTH + place)
        to = row * num_tokens + at
        tl.store(tree_masks + to, tl.where(live, mask | own, 0))
        tl.store(positions + to, tl.where(live, first + at_step, 0))
        tl.store(token_ids + to, tl.where(live, token, 0))
        for start in range(0, size, BLOCK):
            column = start + tl.arange(0, BLOCK)
            state = tl.load(hidden + row * hidden_row_stride + above * hidden_stride + column, mask=column < size)
            tl.store(states + to * size + column, state, mask=column < size)


place_frontier = define_op(
    "spec_decode::place_frontier", PlaceFrontier, mutates=("token_ids", "states", "positions", "tree_masks")
)
