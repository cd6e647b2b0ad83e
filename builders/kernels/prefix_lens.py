"""The prefix of a request: the tokens cached before its query tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton

_BLOCK = 128


class PrefixLens(NamedTuple):
    """Update prefix_lens from the lengths, in place; graph-safe, one kernel.

    prefix_lens      int32 [num_reqs]       written: seq_len minus the request's query tokens; 0 in padding rows
    seq_lens         int32 [num_reqs]       0 in padding rows
    query_start_loc  int32 [num_reqs + 1]
    """

    prefix_lens: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor

    def reference(self) -> None:
        self.prefix_lens.copy_((self.seq_lens - self.query_start_loc.diff()).clamp(min=0))

    def launch(self) -> None:
        num_reqs = len(self.prefix_lens)
        _prefix_lens_kernel[(cdiv(num_reqs, _BLOCK),)](
            prefix_lens_ptr=self.prefix_lens,
            seq_lens_ptr=self.seq_lens,
            query_start_loc_ptr=self.query_start_loc,
            num_reqs=num_reqs,
            BLOCK_R=_BLOCK,
            num_warps=1,
            **dependent_launch(self.prefix_lens.device),
        )


@triton.jit
def _prefix_lens_kernel(
    prefix_lens_ptr,  # out: int32 [num_reqs]
    seq_lens_ptr,  # int32 [num_reqs]
    query_start_loc_ptr,  # int32 [num_reqs + 1]
    num_reqs,
    BLOCK_R: tl.constexpr,  # rows per program
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """prefix_len = max(seq_len - query_len, 0). One program per BLOCK_R rows."""
    await_previous(PDL)
    offs_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = offs_r < num_reqs
    q_start = tl.load(query_start_loc_ptr + offs_r, mask=mask, other=0)
    q_end = tl.load(query_start_loc_ptr + offs_r + 1, mask=mask, other=0)
    seq_len = tl.load(seq_lens_ptr + offs_r, mask=mask, other=0)
    tl.store(prefix_lens_ptr + offs_r, tl.maximum(seq_len - (q_end - q_start), 0), mask=mask)


count_prefix = define_op("builders::count_prefix", PrefixLens, mutates=("prefix_lens",))
