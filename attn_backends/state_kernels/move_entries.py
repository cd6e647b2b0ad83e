"""The compaction of a layer's journals after a verified tree.

Shape legend: R requests, S slots, J journal entries, H key heads, HV value heads, Dk and Dv their dims, W the
convolution's width, C channels, G log decays of a value head, K tokens of a path.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from attn_backends.state_cache import StateCache, StateLengths
from attn_backends.state_kernels.rows import metadata_of
from attn_backends.torch_state import TorchState
from builders import StateSpec
from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


class MoveEntries(NamedTuple):
    """Move the entry of the i-th accepted token to that of query token i, in place; see `StateBackend.move_accepted`.

    conv, key, update, decays: see `StateCache`; contiguous
    base, held: see `StateLengths`; read only
    query_start_loc  int32 [R + 1]
    seq_lens         int32 [R]
    slots            int32 [R], any stride; those of live rows are distinct
    path             int64 [R, K], ascending in each row; a value that is not a query token moves nothing
    """

    conv: torch.Tensor
    key: torch.Tensor
    update: torch.Tensor
    decays: torch.Tensor
    base: torch.Tensor
    held: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor
    path: torch.Tensor

    def reference(self) -> None:
        journal = self.key.shape[1]
        width = self.conv.shape[1] - journal + 1
        spec = StateSpec(num_key_heads=1, num_value_heads=1, key_dim=1, value_dim=1, journal=journal, conv_width=width)
        lengths = StateLengths(self.base, self.held, self.held)
        cache = StateCache(self.update, self.conv, self.key, self.update, self.decays, lengths)
        metadata = metadata_of(self, max_seq_len=0, absorb=False, may_fold=False, reserve=0)
        TorchState().move_accepted([cache], metadata, self.path, spec=spec)

    def launch(self) -> None:
        _, journal, *_ = self.key.shape
        parts = (self.conv, self.key, self.update, self.decays)
        conv, key, update, decays = (part[0, 0].numel() for part in parts)
        block = 1024
        _move_entries_kernel[(len(self.seq_lens), cdiv(max(conv, key, update, decays), block))](
            conv_ptr=self.conv,
            key_ptr=self.key,
            update_ptr=self.update,
            decays_ptr=self.decays,
            base_ptr=self.base,
            held_ptr=self.held,
            query_start_loc_ptr=self.query_start_loc,
            seq_lens_ptr=self.seq_lens,
            slots_ptr=self.slots,
            path_ptr=self.path,
            path_len=self.path.shape[1],
            num_slots=len(self.base),
            window=self.conv.shape[1] - journal,
            stride_slots=self.slots.stride(0),
            stride_path_row=self.path.stride(0),
            stride_path_token=self.path.stride(1),
            CONV_DIM=conv,
            KEY_DIM=key,
            UPDATE_DIM=update,
            DECAY_DIM=decays,
            JOURNAL=journal,
            BLOCK_D=block,
            num_warps=4,
            **dependent_launch(self.seq_lens.device),
        )


@triton.jit
def move_entry(entries_ptr, source, target, offs, DIM: tl.constexpr):
    """Copy an entry of DIM elements."""
    mask = offs < DIM
    tl.store(entries_ptr + target * DIM + offs, tl.load(entries_ptr + source * DIM + offs, mask=mask), mask=mask)


@triton.jit
def _move_entries_kernel(
    conv_ptr,  # in and out: [S, W - 1 + J, C]
    key_ptr,  # in and out: fp32 [S, J, H, Dk]
    update_ptr,  # in and out: fp32 [S, J, HV, Dv]
    decays_ptr,  # in and out: fp32 [S, J, HV, G]
    base_ptr,  # int32 [S]
    held_ptr,  # int32 [S]
    query_start_loc_ptr,  # int32 [R + 1]
    seq_lens_ptr,  # int32 [R]
    slots_ptr,  # int32 [R]
    path_ptr,  # int64 [R, K]
    path_len,  # K
    num_slots,  # S
    window,  # W - 1
    stride_slots,
    stride_path_row,
    stride_path_token,
    CONV_DIM: tl.constexpr,  # C
    KEY_DIM: tl.constexpr,  # H * Dk
    UPDATE_DIM: tl.constexpr,  # HV * Dv
    DECAY_DIM: tl.constexpr,  # HV * G
    JOURNAL: tl.constexpr,  # J
    BLOCK_D: tl.constexpr,  # elements of an entry per program
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """entry[first + 1 + i] = entry[first + path[i]]. One program per row and BLOCK_D elements of each part of an entry.

    A path ascends, and its i-th token comes after i others: no entry is read after another was moved there.
    """
    await_previous(PDL)
    row = tl.program_id(0)
    q_len = tl.load(query_start_loc_ptr + row + 1) - tl.load(query_start_loc_ptr + row)
    seq_len = tl.load(seq_lens_ptr + row)
    slot = tl.load(slots_ptr + row * stride_slots)
    live = (seq_len > 0) & (slot >= 0) & (slot < num_slots)
    slot = tl.where(live, slot, 0).to(tl.int64)
    held = tl.load(held_ptr + slot)
    first = held - q_len
    # A row that the step left out does not end where its lengths say.
    live = live & (seq_len == tl.load(base_ptr + slot) + held) & (first >= 0) & (held <= JOURNAL)
    conv_ptr += slot * ((window + JOURNAL) * CONV_DIM)
    key_ptr += slot * (JOURNAL * KEY_DIM)
    update_ptr += slot * (JOURNAL * UPDATE_DIM)
    decays_ptr += slot * (JOURNAL * DECAY_DIM)
    offs = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    for at in range(tl.where(live, tl.minimum(path_len, q_len - 1), 0)):
        token = tl.load(path_ptr + row * stride_path_row + at * stride_path_token)
        if (token > at + 1) & (token < q_len):
            source = first + token
            target = first + 1 + at
            move_entry(conv_ptr, window + source, window + target, offs, CONV_DIM)
            move_entry(key_ptr, source, target, offs, KEY_DIM)
            move_entry(update_ptr, source, target, offs, UPDATE_DIM)
            move_entry(decays_ptr, source, target, offs, DECAY_DIM)


move_entries = define_op("attn_backends::move_entries", MoveEntries, mutates=("conv", "key", "update", "decays"))
