"""What a step does to the slot of each row: its plan inside kernels, and the count of its tokens after the last layer.

Shape legend: R requests, S slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from attn_backends.state_cache import StateLengths
from attn_backends.torch_state import TorchState
from builders import StateMetadata, StateSpec
from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton


def metadata_of(op: Any, *, num_tokens: int = 0, max_query_len: int = 0, **options: Any) -> StateMetadata:
    """Return the metadata that an op was given. options: fields that it has no arguments for."""
    fields = ("query_start_loc", "seq_lens", "slots", "max_seq_len", "absorb", "may_fold", "reserve", "tree_masks")
    given: dict[str, Any] = {name: getattr(op, name, None) for name in fields} | options
    return StateMetadata(num_reqs=len(op.seq_lens), num_tokens=num_tokens, max_query_len=max_query_len, **given)


def plan_arguments(op: Any, journal: int) -> dict[str, Any]:
    """Return what a kernel passes to `plan_row`, by name. op: `EndStateStep` or one with its
    arguments; journal: entries of a slot."""
    return {
        "base_ptr": op.base,
        "held_ptr": op.held,
        "query_start_loc_ptr": op.query_start_loc,
        "seq_lens_ptr": op.seq_lens,
        "slots_ptr": op.slots,
        "max_seq_len": op.max_seq_len,
        "num_slots": len(op.base),
        "reserve": op.reserve,
        "stride_slots": op.slots.stride(0),
        "JOURNAL": journal,
        "ABSORB": op.absorb,
        "MAY_FOLD": op.may_fold,
    }


@triton.jit
def plan_row(
    row,
    base_ptr,
    held_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    slots_ptr,
    max_seq_len,
    num_slots,
    reserve,
    stride_slots,
    JOURNAL: tl.constexpr,
    ABSORB: tl.constexpr,
    MAY_FOLD: tl.constexpr,
):
    """Return what `attn_backends.state_cache.plan_step` says of a row, or of a block of rows: its first token, its
    query tokens (0 unless live), slot, replay, and whether it is live, fresh, folds and is lost."""
    q_start = tl.load(query_start_loc_ptr + row)
    q_len = tl.load(query_start_loc_ptr + row + 1) - q_start
    seq_len = tl.load(seq_lens_ptr + row)
    slot = tl.load(slots_ptr + row * stride_slots)
    runs = (seq_len > 0) & (seq_len <= max_seq_len) & (q_len > 0) & (slot >= 0) & (slot < num_slots)
    slot = tl.where(runs, slot, 0).to(tl.int64)
    context = seq_len - q_len
    fresh = runs & (context == 0)
    replay = tl.where(fresh, 0, context - tl.load(base_ptr + slot))
    held = tl.where(fresh, 0, tl.load(held_ptr + slot))
    fits = (replay >= 0) & (replay <= held)
    fold = fresh
    if not ABSORB:
        if MAY_FOLD:
            fold = fresh | (replay + q_len + reserve > JOURNAL)
        fits = fits & (fold | (replay + q_len <= JOURNAL))
    live = runs & fits
    lost = runs & (fits == 0)
    return q_start, tl.where(live, q_len, 0), slot, replay, live, fresh & live, fold & live, lost


@triton.jit
def write_entries(
    new,
    entries_ptr,
    replaced_ptr,
    first,
    count,
    replay,
    fold,
    stride_entry,
    width,
    JOURNAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the first `count` rows of new [BLOCK_T, BLOCK_D], of which `width` columns count, to a journal's entries
    from `first` on. A fold begins at 0: the entries that it replays are copied to replaced_ptr before."""
    offs_t = tl.arange(0, BLOCK_T)[:, None]
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    inside = offs_d < width
    if fold:
        for entry in range(0, replay, BLOCK_T):
            offs = (entry + offs_t) * stride_entry + offs_d
            kept = inside & (entry + offs_t < replay)
            tl.store(replaced_ptr + offs, tl.load(entries_ptr + offs, mask=kept, other=0.0), mask=kept)
        # Another thread may copy the entry that this one overwrites.
        tl.debug_barrier()
    written = inside & (offs_t < count) & (first + offs_t < JOURNAL)
    tl.store(entries_ptr + (first + offs_t) * stride_entry + offs_d, new, mask=written)


@triton.jit
def bounded(g):
    """Return log decays from which sums keep their bits, and differences are numbers: exp(-100) is 0 in fp32."""
    return tl.maximum(g, -100.0)


class EndStateStep(NamedTuple):
    """Count the tokens of a step in base, held and lost int32 [S], in place; see `StateBackend.end_step`.

    query_start_loc  int32 [R + 1]
    seq_lens         int32 [R]
    slots            int32 [R], any stride; those of live rows are distinct
    journal          entries of a slot; like all that follow, a capture constant
    max_seq_len, absorb, may_fold, reserve: as in `StateMetadata`
    """

    base: torch.Tensor
    held: torch.Tensor
    lost: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor
    journal: int
    max_seq_len: int
    absorb: bool
    may_fold: bool
    reserve: int

    def reference(self) -> None:
        spec = StateSpec(num_key_heads=1, num_value_heads=1, key_dim=1, value_dim=1, journal=self.journal)
        lengths = StateLengths(self.base, self.held, self.lost)
        TorchState().end_step(lengths, metadata_of(self), spec=spec)

    def launch(self) -> None:
        num_reqs, block = len(self.seq_lens), 128
        _end_state_step_kernel[(cdiv(num_reqs, block),)](
            lost_ptr=self.lost,
            num_reqs=num_reqs,
            BLOCK_R=block,
            num_warps=1,
            **plan_arguments(self, self.journal),
            **dependent_launch(self.seq_lens.device),
        )


@triton.jit
def _end_state_step_kernel(
    base_ptr,  # in and out: int32 [S]
    held_ptr,  # in and out: int32 [S]
    lost_ptr,  # out: int32 [S]
    query_start_loc_ptr,  # int32 [R + 1]
    seq_lens_ptr,  # int32 [R]
    slots_ptr,  # int32 [R]
    num_reqs,  # R
    max_seq_len,
    num_slots,  # S
    reserve,
    stride_slots,
    JOURNAL: tl.constexpr,
    ABSORB: tl.constexpr,
    MAY_FOLD: tl.constexpr,
    BLOCK_R: tl.constexpr,  # rows per program
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """base, held = context, query tokens if the row folds, else held = replay + query tokens. One program per BLOCK_R
    rows."""
    await_previous(PDL)
    offs_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = offs_r < num_reqs
    row = tl.minimum(offs_r, num_reqs - 1)
    _, q_len, slot, replay, live, _, fold, lost = plan_row(
        row, base_ptr, held_ptr, query_start_loc_ptr, seq_lens_ptr, slots_ptr, max_seq_len, num_slots, reserve,
        stride_slots, JOURNAL, ABSORB, MAY_FOLD,
    )  # fmt: skip
    live = live & inside
    seq_len = tl.load(seq_lens_ptr + row)
    if ABSORB:
        tl.store(base_ptr + slot, seq_len, mask=live)
        tl.store(held_ptr + slot, tl.zeros_like(seq_len), mask=live)
    else:
        tl.store(base_ptr + slot, seq_len - q_len, mask=live & fold)
        tl.store(held_ptr + slot, tl.where(fold, 0, replay) + q_len, mask=live)
    tl.store(lost_ptr + slot, tl.full((BLOCK_R,), 1, tl.int32), mask=lost & inside)


end_state_step = define_op("attn_backends::end_state_step", EndStateStep, mutates=("base", "held", "lost"))
