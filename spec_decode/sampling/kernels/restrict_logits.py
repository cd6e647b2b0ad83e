"""Top-k and top-p: set to -inf the logits of tokens that may not be sampled."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.errors import require, require_tensor
from builders.kernels.op import define_op
from builders.kernels.triton_runtime import dependent_launch, triton
from spec_decode.sampling.kernels.restrict_logits_kernels import (
    count_bins_kernel,
    find_range_kernel,
    gather_bin_kernel,
    mask_logits_kernel,
    top_k_threshold_kernel,
    top_p_threshold_kernel,
)

_PART = 4096
"""Logits of a row that one program takes: few enough that a single row keeps many SMs busy."""

_PROGRAMS = 2048
"""Programs that keep a device busy: more of them would only cost rows without a restriction their start."""

_BINS = 32
"""Sections of a row's range that are counted at once: a thread holds a count and a sum for each in registers."""

_LANES = 128
"""Threads of a program that counts. Adding up their sums at the end costs as much as a few dozen logits."""

_CAPACITY = 16384
"""Logits of one bin that are copied out to be searched; if it holds more, the search reads the whole row."""

_BLOCK = 1024
"""Logits that a search reads at once, and a quarter of what it keeps in registers."""


def restrict_logits(logits: torch.Tensor, *, top_k: torch.Tensor, top_p: torch.Tensor) -> None:
    """Write -inf, in place, where a token is outside its row's top_k, or outside top_p of what top_k left.

    - logits  fp32 [R * G, V], contiguous, already divided by the temperature; G rows in turn for each request
    - top_k   int32 [R]; off where it is 0, or V and more
    - top_p   fp32 [R]; off where it is 1 and more

    A row with both off is not read. top_k keeps logits of at least the k-th largest; top_p then keeps the fewest most
    probable tokens that hold at least that share of what top_k left (Holtzman et al., 2020, section 3.1). Tokens of
    equal logits stay or go together, so the result depends on no order: a tie at the threshold keeps more than k
    tokens, or than the fewest. The most probable token always stays. At top_p's threshold a share is a sum in fp64 on
    the CPU and in fp32 on CUDA, there in an order of its own, the same in every run.

    Raises BatchError, with nothing written, for tensors of another shape, dtype, device or layout.
    """
    rows = len(top_k)
    require_tensor("logits", logits, shape=(None, None), dtype=torch.float32, device=logits.device)
    require_tensor("top_k", top_k, shape=(rows,), dtype=torch.int32, device=logits.device)
    require_tensor("top_p", top_p, shape=(rows,), dtype=torch.float32, device=logits.device)
    require(
        rows > 0 and len(logits) % rows == 0 and logits.is_contiguous(),
        f"logits must be contiguous, with as many rows for each of the {rows} requests, got {len(logits)} rows of "
        f"strides {logits.stride()}; rows would be cut by another request's top_k and top_p. "
        "Pass [requests * tokens, vocabulary].",
    )
    _restrict_logits(logits, top_k, top_p)


class RestrictLogits(NamedTuple):
    """The arguments of the op; restrict_logits documents them."""

    logits: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor

    def reference(self) -> None:
        vocab, group = self.logits.shape[1], len(self.logits) // len(self.top_k)
        k = self.top_k.long().repeat_interleave(group)[:, None]
        p = self.top_p.repeat_interleave(group)[:, None]
        k = torch.where(k > 0, k, vocab).clamp(max=vocab)
        ranked = self.logits.double().sort(-1, descending=True).values
        kth = ranked.gather(1, k - 1)
        share = ranked.masked_fill(ranked < kth, -torch.inf).softmax(-1).cumsum(-1)
        last = (share < p).sum(-1, keepdim=True).clamp(max=vocab - 1)
        threshold = torch.where(p < 1, torch.maximum(kth, ranked.gather(1, last)), kth)
        self.logits.masked_fill_(self.logits < threshold, -torch.inf)

    def launch(self) -> None:
        (rows, vocab), device = self.logits.shape, self.logits.device
        part = min(_PART, triton.next_power_of_2(vocab))
        lanes = min(_LANES, part)
        parts = triton.cdiv(vocab, part)
        block = min(_BLOCK, part)
        capacity = min(_CAPACITY, vocab)
        table = {"BINS": _BINS, "PARTS": triton.next_power_of_2(parts)}
        walk = {"PART": part, "num_warps": max(1, min(8, part // 128))}
        count = {**table, "PART": part, "LANES": lanes, "num_warps": max(1, lanes // 32)}
        gather = {**table, "CAPACITY": capacity, **walk}
        search = {**table, "CAPACITY": capacity, "BLOCK": block, "num_warps": max(1, block // 128)}

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        # What the kernels hand on; never written for a row without a restriction.
        part_min = empty(rows, parts)  # the least logit of a part that is not a mask, else inf
        part_max = empty(rows, parts)  # the largest logit of a part
        edges = empty(rows, _BINS)  # the least logit of a bin, which ends where the next begins; the last has no end
        maxima = empty(rows)  # the largest logit
        counts = empty(rows, _BINS, parts, dtype=torch.int32)  # how many logits of a part are not below a bin's edge
        sums = empty(rows, _BINS, parts)  # their sum of exponentials, where top_p is on
        bins = empty(rows, dtype=torch.int32)  # the bin of top_k's threshold, then that of top_p's
        members = empty(rows, capacity)  # the first of that bin's logits
        thresholds = empty(rows)  # top_k's, then the larger of both
        targets = empty(rows)  # the sum of exponentials that the kept members of top_p's bin have to reach

        size = (vocab, rows // len(self.top_k), parts)
        bin_members, found = (edges, counts, bins, members), (bins, members, thresholds, targets)
        by_part, by_row = (rows, min(parts, max(1, _PROGRAMS // rows))), (rows,)
        pdl = dependent_launch(device)
        find_range_kernel[by_part](*self, part_min, part_max, *size, **walk, **pdl)
        count_bins_kernel[by_part](*self, part_min, part_max, edges, maxima, counts, sums, *size, **count, **pdl)
        gather_bin_kernel[by_part](*self, *bin_members, *size, TOP_P=False, **gather, **pdl)
        top_k_threshold_kernel[by_row](*self, edges, maxima, counts, sums, *found, *size, **search, **pdl)
        gather_bin_kernel[by_part](*self, *bin_members, *size, TOP_P=True, **gather, **pdl)
        top_p_threshold_kernel[by_row](*self, edges, maxima, counts, *found, *size, **search, **pdl)
        mask_logits_kernel[by_part](*self, thresholds, *size, **walk, **pdl)


_restrict_logits = define_op("spec_decode::restrict_logits", RestrictLogits, mutates=("logits",))
