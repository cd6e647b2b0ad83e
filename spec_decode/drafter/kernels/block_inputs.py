"""The inputs of a block draft: each request's accepted tokens, shifted as in step 0, then mask tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


class BlockInputs(NamedTuple):
    """Return token_ids int64 [R * Q] and target_hidden_states [R * Q, F] for Q places a row.

    Up to place accepted[r], row r has the tokens of ShiftTokens and the target's states. Every later place has the mask
    token and the mask state.

    token_ids             int64 [R, 1 + K]
    target_hidden_states  [R, 1 + K, F]    contiguous
    next_tokens           int64 [>= R]
    accepted              int32 [>= R]     clamped to [0, K] on the device, since the host cannot check it
    mask_hidden           [F]              same dtype, contiguous
    mask_token_id         token of the masked places
    query_len             Q, at least 1 + K
    """

    token_ids: torch.Tensor
    target_hidden_states: torch.Tensor
    next_tokens: torch.Tensor
    accepted: torch.Tensor
    mask_hidden: torch.Tensor
    mask_token_id: int
    query_len: int

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows, verified = self.token_ids.shape
        place, last = torch.arange(self.query_len)[None], self.accepted[:rows, None].clamp(0, verified - 1)
        from_target = place.clamp(max=verified - 1).expand(rows, -1)
        following = self.token_ids.roll(-1, 1).gather(1, from_target)
        tokens = torch.where(place < last, following, self.next_tokens[:rows, None])
        states = self.target_hidden_states[torch.arange(rows)[:, None], from_target]
        is_mask = place > last
        tokens = torch.where(is_mask, self.mask_token_id, tokens)
        return tokens.flatten(), torch.where(is_mask[..., None], self.mask_hidden, states).flatten(0, 1)

    def fake(self) -> tuple[torch.Tensor, torch.Tensor]:
        places, states = len(self.token_ids) * self.query_len, self.target_hidden_states
        return self.token_ids.new_empty(places), states.new_empty(places, states.shape[2])

    def launch(self) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, states = self.fake()
        (rows, verified), width = self.token_ids.shape, states.shape[1]
        block = min(1024, next_power_of_2(width))
        _block_inputs_kernel[(rows, self.query_len, cdiv(width, block))](
            token_ids_ptr=self.token_ids,
            target_hidden_states_ptr=self.target_hidden_states,
            next_tokens_ptr=self.next_tokens,
            num_accepted_ptr=self.accepted,
            mask_hidden_ptr=self.mask_hidden,
            mask_token_id=self.mask_token_id,
            out_tokens_ptr=tokens,
            out_states_ptr=states,
            num_verified=verified,
            query_len=self.query_len,
            hidden_size=width,
            stride_token_ids=self.token_ids.stride(0),
            BLOCK_H=block,
            num_warps=max(1, min(4, block // 256)),
            **dependent_launch(tokens.device),
        )
        return tokens, states


@triton.jit
def _block_inputs_kernel(
    token_ids_ptr,  # int64 [R, 1 + K]
    target_hidden_states_ptr,  # [R, 1 + K, F]
    next_tokens_ptr,  # int64 [>= R]
    num_accepted_ptr,  # int32 [>= R]
    mask_hidden_ptr,  # [F]
    mask_token_id,
    out_tokens_ptr,  # out: int64 [R * Q]
    out_states_ptr,  # out: [R * Q, F]
    num_verified,  # 1 + K
    query_len,  # Q
    hidden_size,  # F
    stride_token_ids,
    BLOCK_H: tl.constexpr,  # columns per program
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """Write token and state of place q of a row. Grid [R, Q, ceil(F / BLOCK_H)]; the first block writes the token."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    q = tl.program_id(1)
    offs_h = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < hidden_size
    num_accepted = tl.minimum(tl.maximum(tl.load(num_accepted_ptr + row), 0), num_verified - 1)
    # Masked: q + 1 can lie past the end of the row.
    following = tl.load(token_ids_ptr + row * stride_token_ids + q + 1, mask=q < num_accepted, other=0)
    token = tl.where(q < num_accepted, following, tl.load(next_tokens_ptr + row))
    state_ptrs = target_hidden_states_ptr + (row * num_verified + q) * hidden_size + offs_h
    state = tl.load(state_ptrs, mask=mask_h & (q <= num_accepted), other=0.0)
    mask_state = tl.load(mask_hidden_ptr + offs_h, mask=mask_h & (q > num_accepted), other=0.0)
    out_row = row * query_len + q
    state = tl.where(q > num_accepted, mask_state, state)
    tl.store(out_states_ptr + out_row * hidden_size + offs_h, state, mask=mask_h)
    if tl.program_id(2) == 0:
        tl.store(out_tokens_ptr + out_row, tl.where(q > num_accepted, mask_token_id, token))


block_inputs = define_op("spec_decode::block_inputs", BlockInputs)
