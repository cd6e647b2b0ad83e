"""Top-k and top-p: take the tokens that may not be sampled out of rows of logits."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.errors import require, require_tensor
from builders.kernels.op_by_schema import define_op_by_schema
from builders.kernels.triton_runtime import dependent_launch, triton
from spec_decode.sampling.kernels.restrict_logits_kernels import (
    cut_kernel,
    extent_kernel,
    gather_kernel,
    rank_kernel,
    share_kernel,
    weigh_kernel,
)

_PART = 4096
"""Logits of a row that one program takes: few enough that one row alone keeps many num_sms busy."""

_BINS = 32
"""Sections of a row's range that are counted at once: a thread holds a count and a mass for each in registers."""

_LANES = 128
"""Threads of a program that weighs. Their sums are added up in the end, which costs as much as a few dozen logits."""

_CAPACITY = 16384
"""Logits of one bin that are copied out to be searched; where they are more, the search walks over the row."""

_BLOCK = 1024
"""Logits that a search takes at once, and a quarter of what it keeps in registers."""


def restrict_logits(logits: torch.Tensor, *, top_k: torch.Tensor, top_p: torch.Tensor) -> None:
    """Writes -inf, in place, where a token is outside its row's top_k, or outside top_p of what top_k left.

    logits fp32 [R * G, V], contiguous and already divided by the temperature: G rows in turn for each of top_k int32
    [R] (0 or V and more: off) and top_p fp32 [R] (1 and more: off). A row with both off is not read.

    top_k keeps what is at least the k-th largest logit; top_p then keeps the fewest most probable tokens that hold at
    least that share of what top_k left (Holtzman et al., 2020, section 3.1). Tokens of equal logits stay or go
    together, so that the outcome depends on no order: a tie at the threshold keeps more than k tokens, or than the
    fewest. The most probable token always stays. At top_p's threshold a share is a sum in fp64 on the CPU and in fp32
    on CUDA, there in an order of its own, the same in every run.

    Raises BatchError, with nothing written, for tensors of another shape, dtype, device or layout.
    """
    rows = len(top_k)
    require_tensor("logits", logits, shape=(None, None), dtype=torch.float32, device=logits.device)
    require_tensor("top_k", top_k, shape=(rows,), dtype=torch.int32, device=logits.device)
    require_tensor("top_p", top_p, shape=(rows,), dtype=torch.float32, device=logits.device)
    require(
        rows > 0 and len(logits) % rows == 0 and logits.is_contiguous(),
        f"logits must be contiguous, with as many rows for each of the {rows} requests, got {len(logits)} rows of "
        f"strides {logits.stride()}; rows would be cut by another request's top_k and top_p, so nothing was written. "
        "Pass [requests * tokens, vocabulary].",
    )
    _restrict_op(logits, top_k, top_p)


def _restrict(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> None:
    vocab, group = logits.shape[1], len(logits) // len(top_k)
    k = top_k.long().repeat_interleave(group)[:, None]
    p = top_p.repeat_interleave(group)[:, None]
    k = torch.where(k > 0, k, vocab).clamp(max=vocab)
    ranked = logits.double().sort(-1, descending=True).values
    kth = ranked.gather(1, k - 1)
    share = ranked.masked_fill(ranked < kth, -torch.inf).softmax(-1).cumsum(-1)
    last = (share < p).sum(-1, keepdim=True).clamp(max=vocab - 1)
    threshold = torch.where(p < 1, torch.maximum(kth, ranked.gather(1, last)), kth)
    logits.masked_fill_(logits < threshold, -torch.inf)


class _Scratch(NamedTuple):
    """What the kernels hand on, of R rows in P parts, and B bins; of a row that is not restricted it is never written.

    least       fp32 [R, P]      a part's least logit that is no mask, else inf
    largest     fp32 [R, P]      a part's largest logit
    edges       fp32 [R, B]      the least that a bin takes in; a bin ends where the next one begins, the last nowhere
    peaks       fp32 [R]         the largest logit
    counts      int32 [R, B, P]  how many logits of a part are not below a bin's edge
    masses      fp32 [R, B, P]   their mass, where top_p is on
    bins        int32 [R]        the bin of top_k's threshold, then that of top_p's
    members     fp32 [R, C]      the first C of that bin's logits
    thresholds  fp32 [R]         top_k's, then the larger of both
    targets     fp32 [R]         the mass that the members of top_p's bin which stay have to reach
    """

    least: torch.Tensor
    largest: torch.Tensor
    edges: torch.Tensor
    peaks: torch.Tensor
    counts: torch.Tensor
    masses: torch.Tensor
    bins: torch.Tensor
    members: torch.Tensor
    thresholds: torch.Tensor
    targets: torch.Tensor

    @classmethod
    def allocate(cls, rows: int, parts: int, capacity: int, device: torch.device) -> _Scratch:
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            least=empty(rows, parts),
            largest=empty(rows, parts),
            edges=empty(rows, _BINS),
            peaks=empty(rows),
            counts=empty(rows, _BINS, parts, dtype=torch.int32),
            masses=empty(rows, _BINS, parts),
            bins=empty(rows, dtype=torch.int32),
            members=empty(rows, capacity),
            thresholds=empty(rows),
            targets=empty(rows),
        )


def _launch(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> None:
    rows, vocab = logits.shape
    part = min(_PART, triton.next_power_of_2(vocab))
    lanes = min(_LANES, part)
    parts = triton.cdiv(vocab, part)
    block = min(_BLOCK, part)
    capacity = min(_CAPACITY, vocab)
    table = {"BINS": _BINS, "PARTS": triton.next_power_of_2(parts)}
    walk = {"PART": part, "num_warps": max(1, min(8, part // 128))}
    weigh = {**table, "PART": part, "LANES": lanes, "num_warps": max(1, lanes // 32)}
    gather = {**table, "CAPACITY": capacity, **walk}
    search = {**table, "CAPACITY": capacity, "BLOCK": block, "num_warps": max(1, block // 128)}

    row, size = (logits, top_k, top_p), (vocab, rows // len(top_k))
    s = _Scratch.allocate(rows, parts, capacity, logits.device)
    totals = s.edges, s.peaks, s.counts, s.masses
    bin_of_row = s.edges, s.counts, s.bins, s.members
    outcome = s.bins, s.members, s.thresholds, s.targets
    by_part, by_row = (rows, parts), (rows,)
    device = logits.device
    extent_kernel[by_part](*row, s.least, s.largest, *size, **walk, **dependent_launch(device))
    weigh_kernel[by_part](*row, s.least, s.largest, *totals, *size, **weigh, **dependent_launch(device))
    gather_kernel[by_part](*row, *bin_of_row, *size, SHARES=False, **gather, **dependent_launch(device))
    rank_kernel[by_row](*row, *totals, *outcome, *size, parts, **search, **dependent_launch(device))
    gather_kernel[by_part](*row, *bin_of_row, *size, SHARES=True, **gather, **dependent_launch(device))
    share_kernel[by_row](*row, *totals[:3], *outcome, *size, parts, **search, **dependent_launch(device))
    cut_kernel[by_part](*row, s.thresholds, *size, **walk, **dependent_launch(device))


_restrict_op = define_op_by_schema(
    "spec_decode::restrict_logits",
    "(Tensor(a!) logits, Tensor top_k, Tensor top_p) -> ()",
    cpu=_restrict,
    cuda=_launch,
)
