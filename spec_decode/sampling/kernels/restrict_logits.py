"""Top-k and top-p: set the logits of excluded tokens to -inf.

The kernels search for two thresholds: top_k's by counting logits, top_p's by summing exp(x - the row's largest logit).
A bin holds the logits from its edge up to the next bin's. Bin membership is decided by comparing logits with stored
edges: an edge computed again could be rounded differently.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from builders.errors import require, require_tensor
from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling.kernels.process_logits import restriction
from spec_decode.sampling.kernels.threshold_search import search, walk

_PART = 4096
"""Logits of a part, the unit that a program takes: few enough that a single row keeps many SMs busy."""

_PROGRAMS = 2048
"""Programs that keep a device busy: more would only add launch time for rows without a restriction."""

_BINS = 32
"""Bins of a row's range that are counted at once: a thread holds a count and a sum for each in registers."""

_LANES = 128
"""Threads per counting program. Reducing over them at the end costs as much as a few dozen logits."""

_CAPACITY = 16384
"""The most logits of a bin that are copied out for the search; if it holds more, the search reads the whole row."""

_BLOCK = 1024
"""Logits that a search reads at once; it keeps four times as many in registers."""


def restrict_logits(logits: torch.Tensor, *, top_k: torch.Tensor, top_p: torch.Tensor) -> None:
    """Write -inf, in place, where a token is outside its row's top_k, or outside top_p of what top_k left.

    - logits  fp32 [R * G, V], contiguous, already divided by the temperature; G consecutive rows per request
    - top_k   int32 [R]; off if 0, or V or more
    - top_p   fp32 [R]; off if 1 or more

    A row with both off is not read. top_k keeps logits of at least the k-th largest; top_p then keeps the fewest most
    probable tokens that hold at least that share of what top_k left (Holtzman et al., 2020, section 3.1). Tokens with
    equal logits stay or go together, so the result depends on no order: a tie at the threshold keeps more than k
    tokens, or more than the fewest. The most probable token always stays. Shares at top_p's threshold are summed in
    fp64 on the CPU and in fp32 on CUDA, there in an order that differs from the CPU's but is the same in every run.

    Raises BatchError, with nothing written, for tensors of the wrong shape, dtype, device or layout.
    """
    rows = len(top_k)
    require_tensor("logits", logits, shape=(None, None), dtype=torch.float32, device=logits.device)
    require_tensor("top_k", top_k, shape=(rows,), dtype=torch.int32, device=logits.device)
    require_tensor("top_p", top_p, shape=(rows,), dtype=torch.float32, device=logits.device)
    require(
        rows > 0 and len(logits) % rows == 0 and logits.is_contiguous(),
        f"logits must be contiguous, with equally many rows for each of {rows} requests, got {len(logits)} rows of "
        f"strides {logits.stride()}; top_k and top_p would restrict another request's rows. Pass [requests * tokens, "
        "vocabulary].",
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
        part = min(_PART, next_power_of_2(vocab))
        lanes = min(_LANES, part)
        parts = cdiv(vocab, part)
        block = min(_BLOCK, part)
        capacity = min(_CAPACITY, vocab)
        table = {"BINS": _BINS, "BLOCK_PARTS": next_power_of_2(parts)}
        walk = {"PART": part, "num_warps": max(1, min(8, part // 128))}
        count = {**table, "PART": part, "LANES": lanes, "num_warps": max(1, lanes // 32)}
        gather = {**table, "CAPACITY": capacity, **walk}
        search = {**table, "CAPACITY": capacity, "BLOCK": block, "num_warps": max(1, block // 128)}

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        # Intermediate results between the kernels; not written for a row without a restriction.
        part_min = empty(rows, parts)  # the least unmasked logit of a part, or inf
        part_max = empty(rows, parts)  # the largest logit of a part
        edges = empty(rows, _BINS)  # the least logit of a bin, which ends at the next edge; the last has no end
        maxima = empty(rows)  # the largest logit
        counts = empty(rows, _BINS, parts, dtype=torch.int32)  # logits of a part at or above a bin's edge
        sums = empty(rows, _BINS, parts)  # their sum of exponentials, if top_p is on
        bins = empty(rows, dtype=torch.int32)  # the bin of top_k's threshold, then that of top_p's
        members = empty(rows, capacity)  # the first logits of that bin
        thresholds = empty(rows)  # top_k's, then the larger of both
        targets = empty(rows)  # the sum of exponentials that the kept members of top_p's bin must reach

        row: dict[str, Any] = {"logits_ptr": self.logits, "top_k_ptr": self.top_k, "top_p_ptr": self.top_p}
        row |= {"vocab_size": vocab, "group_size": rows // len(self.top_k), "num_parts": parts}
        part_range = {"part_min_ptr": part_min, "part_max_ptr": part_max}
        bin_counts = {"edges_ptr": edges, "max_ptr": maxima, "counts_ptr": counts}
        bin_members = {"edges_ptr": edges, "counts_ptr": counts, "bins_ptr": bins, "members_ptr": members}
        found = {"bins_ptr": bins, "members_ptr": members, "thresholds_ptr": thresholds, "targets_ptr": targets}
        by_part, by_row = (rows, min(parts, max(1, _PROGRAMS // rows))), (rows,)
        pdl = dependent_launch(device)
        find_range_kernel[by_part](**row, **part_range, **walk, **pdl)
        count_bins_kernel[by_part](**row, **part_range, **bin_counts, sums_ptr=sums, **count, **pdl)
        gather_bin_kernel[by_part](**row, **bin_members, TOP_P=False, **gather, **pdl)
        top_k_threshold_kernel[by_row](**row, **bin_counts, sums_ptr=sums, **found, **search, **pdl)
        gather_bin_kernel[by_part](**row, **bin_members, TOP_P=True, **gather, **pdl)
        top_p_threshold_kernel[by_row](**row, **bin_counts, **found, **search, **pdl)
        mask_logits_kernel[by_part](**row, thresholds_ptr=thresholds, **walk, **pdl)


_restrict_logits = define_op("spec_decode::restrict_logits", RestrictLogits, mutates=("logits",))


_MASK = tl.constexpr(-1e9)  # logits at or below this count as masked
_LEAST = tl.constexpr(-3.4028234663852886e38)  # the lowest finite fp32


@triton.jit
def find_range_kernel(
    logits_ptr,  # fp32 [R * G, V]
    top_k_ptr,  # int32 [R]
    top_p_ptr,  # fp32 [R]
    part_min_ptr,  # out: fp32 [R * G, parts]
    part_max_ptr,  # out: fp32 [R * G, parts]
    vocab_size,  # V
    group_size,  # G
    num_parts,  # per row
    PART: tl.constexpr,  # logits per part
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """Store each part's least unmasked logit, or inf, and its largest, or -inf. A program takes parts of one row."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    _, _, has_top_k, has_top_p = restriction(top_k_ptr, top_p_ptr, row // group_size, vocab_size)
    if has_top_k | has_top_p:
        for part in range(tl.program_id(1), num_parts, tl.num_programs(1)):
            x = _load(logits_ptr, row, part * PART + tl.arange(0, PART), vocab_size)
            part_offs = row * num_parts + part
            # A finite mask value must not widen the range: it goes to the lowest bin.
            tl.store(part_min_ptr + part_offs, tl.min(tl.where(x > _MASK, x, float("inf")), 0))
            tl.store(part_max_ptr + part_offs, tl.max(tl.where(x > float("-inf"), x, float("-inf")), 0))


@triton.jit
def count_bins_kernel(
    logits_ptr,  # fp32 [R * G, V]
    top_k_ptr,  # int32 [R]
    top_p_ptr,  # fp32 [R]
    part_min_ptr,  # fp32 [R * G, parts]
    part_max_ptr,  # fp32 [R * G, parts]
    edges_ptr,  # out: fp32 [R * G, BINS]
    max_ptr,  # out: fp32 [R * G]
    counts_ptr,  # out: int32 [R * G, BINS, parts]
    sums_ptr,  # out: fp32 [R * G, BINS, parts]
    vocab_size,  # V
    group_size,  # G
    num_parts,  # per row
    PART: tl.constexpr,  # logits per part
    LANES: tl.constexpr,  # logits counted per iteration
    BINS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,  # parts, rounded up to a power of two
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """Count the logits of each part at or above each edge, and for top_p sum their exponentials. A program takes parts
    of one row.
    """
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    _, p, has_top_k, has_top_p = restriction(top_k_ptr, top_p_ptr, row // group_size, vocab_size)
    if has_top_k | has_top_p:
        # 1. The row's range, and the edges of its bins
        offs_parts = tl.arange(0, BLOCK_PARTS)
        part_offs, mask = row * num_parts + offs_parts, offs_parts < num_parts
        row_max = tl.max(tl.load(part_max_ptr + part_offs, mask=mask, other=float("-inf")), 0)
        row_min = tl.min(tl.load(part_min_ptr + part_offs, mask=mask, other=float("inf")), 0)
        if has_top_p & (not has_top_k):
            # All logits below this together weigh less than 1 - p times the weight of the largest logit.
            row_min = tl.maximum(row_min, row_max - tl.log(vocab_size / (1.0 - p)))
        row_min = tl.minimum(row_min, row_max)
        offs_bin = tl.arange(0, BINS)
        edges = tl.where(offs_bin > 0, row_min + (row_max - row_min) * (offs_bin * (1.0 / BINS)), _LEAST)
        if tl.program_id(1) == 0:
            tl.store(edges_ptr + row * BINS + offs_bin, edges)
            tl.store(max_ptr + row, row_max)
        # 2. Each part's totals from each edge on
        for part in range(tl.program_id(1), num_parts, tl.num_programs(1)):
            count_offs = (row * BINS + offs_bin) * num_parts + part
            if has_top_p:
                count, sum_exp = _count_part(logits_ptr, row, part, vocab_size, edges, row_max, True, PART, LANES, BINS)
                tl.store(sums_ptr + count_offs, sum_exp)
            else:
                count, sum_exp = _count_part(
                    logits_ptr, row, part, vocab_size, edges, row_max, False, PART, LANES, BINS
                )
            tl.store(counts_ptr + count_offs, count)


@triton.jit
def _count_part(
    logits_ptr,  # fp32 [R * G, V]
    row,
    part,
    vocab_size,  # V
    edges,  # fp32 [BINS]
    row_max,  # the row's largest logit
    SUM_EXP: tl.constexpr,  # sum exponentials too
    PART: tl.constexpr,
    LANES: tl.constexpr,
    BINS: tl.constexpr,
):
    """Return the counts and sums of a part. Every thread compares its own logits with all edges, so the only reduction
    across threads is at the end."""
    count = tl.zeros((BINS, LANES), tl.float32)
    sum_exp = tl.zeros((BINS, LANES), tl.float32)
    for start in tl.range(part * PART, tl.minimum((part + 1) * PART, vocab_size), LANES, loop_unroll_factor=4):
        x = _load(logits_ptr, row, start + tl.arange(0, LANES), vocab_size)
        # Use factors, not conditions: 32 conditions do not fit in a thread's predicate registers.
        reached = (x[None, :] >= edges[:, None]).to(tl.float32)
        count += reached
        if SUM_EXP:
            sum_exp += reached * tl.exp(x - row_max)[None, :]
    return tl.sum(count, 1).to(tl.int32), tl.sum(sum_exp, 1)


@triton.jit
def gather_bin_kernel(
    logits_ptr,  # fp32 [R * G, V]
    top_k_ptr,  # int32 [R]
    top_p_ptr,  # fp32 [R]
    edges_ptr,  # fp32 [R * G, BINS]
    counts_ptr,  # int32 [R * G, BINS, parts]
    bins_ptr,  # in and out: int32 [R * G]
    members_ptr,  # out: fp32 [R * G, CAPACITY]
    vocab_size,  # V
    group_size,  # G
    num_parts,  # per row
    TOP_P: tl.constexpr,
    PART: tl.constexpr,  # logits per part
    BINS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,  # parts, rounded up to a power of two
    CAPACITY: tl.constexpr,  # logits of a bin that are copied out
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """Copy out the members of the bin that holds a threshold, in token order, up to CAPACITY.

    With TOP_P the bin was chosen earlier; else it is that of the k-th largest logit. A program takes parts of a row.
    """
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    k, _, has_top_k, has_top_p = restriction(top_k_ptr, top_p_ptr, row // group_size, vocab_size)
    wanted = has_top_p if TOP_P else has_top_k
    if wanted:
        # 1. The bin
        if TOP_P:
            bin = tl.load(bins_ptr + row)
        else:
            bin = _last_bin_reaching(_totals(counts_ptr, row, num_parts, BINS, BLOCK_PARTS), k)
            if tl.program_id(1) == 0:
                tl.store(bins_ptr + row, bin)
        lower, upper = _bounds(edges_ptr, row, bin, BINS)
        # 2. Each part's members, after those of earlier parts
        offs_parts = tl.arange(0, BLOCK_PARTS)
        part_counts = _members_of_part(counts_ptr, row, bin, offs_parts, num_parts, BINS)
        for part in range(tl.program_id(1), num_parts, tl.num_programs(1)):
            if _members_of_part(counts_ptr, row, bin, part, num_parts, BINS) > 0:
                num_before = tl.sum(tl.where(offs_parts < part, part_counts, 0), 0)
                x = _load(logits_ptr, row, part * PART + tl.arange(0, PART), vocab_size)
                mask = (x >= lower) & (x < upper)
                slot = num_before + tl.cumsum(mask.to(tl.int32), 0) - 1
                tl.store(members_ptr + row * CAPACITY + slot, x, mask=mask & (slot < CAPACITY))


@triton.jit
def top_k_threshold_kernel(
    logits_ptr,  # fp32 [R * G, V]
    top_k_ptr,  # int32 [R]
    top_p_ptr,  # fp32 [R]
    edges_ptr,  # fp32 [R * G, BINS]
    max_ptr,  # fp32 [R * G]
    counts_ptr,  # int32 [R * G, BINS, parts]
    sums_ptr,  # fp32 [R * G, BINS, parts]
    bins_ptr,  # in and out: int32 [R * G]
    members_ptr,  # fp32 [R * G, CAPACITY]
    thresholds_ptr,  # out: fp32 [R * G]
    targets_ptr,  # out: fp32 [R * G]
    vocab_size,  # V
    group_size,  # G
    num_parts,  # per row
    BINS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,  # parts, rounded up to a power of two
    CAPACITY: tl.constexpr,  # logits of a bin that are copied out
    BLOCK: tl.constexpr,  # logits that a search reads per iteration
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """Find top_k's threshold, and for top_p its bin and the sum of exponentials that this bin must add to the bins
    above. One program per row.
    """
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    k, p, has_top_k, has_top_p = restriction(top_k_ptr, top_p_ptr, row // group_size, vocab_size)
    if has_top_k | has_top_p:
        row_max = tl.load(max_ptr + row)
        sum_exp = tl.zeros((BINS,), tl.float32)
        if has_top_p:
            sum_exp = _totals(sums_ptr, row, num_parts, BINS, BLOCK_PARTS)
        # 1. top_k's threshold, and the sum of exponentials of what it keeps
        threshold = float("-inf")
        kept_sum = _at(sum_exp, 0)
        bin = 0
        if has_top_k:
            bin = tl.load(bins_ptr + row)
            lower, upper = _bounds(edges_ptr, row, bin, BINS)
            count = _totals(counts_ptr, row, num_parts, BINS, BLOCK_PARTS)
            above = _at(count, bin + 1)
            x_ptr, num_x = _members(logits_ptr, row, vocab_size, members_ptr, _at(count, bin) - above, CAPACITY)
            threshold = search(x_ptr, num_x, lower, upper, (k - above).to(tl.float32), row_max, False, BLOCK)
            if has_top_p:
                kept_sum, _, _ = walk(x_ptr, num_x, threshold, threshold, upper, upper, row_max, True, BLOCK)
                kept_sum += _at(sum_exp, bin + 1)
        tl.store(thresholds_ptr + row, threshold)
        # 2. top_p's bin and target
        if has_top_p:
            target = p * kept_sum
            bin = _last_bin_reaching(sum_exp, target)
            tl.store(bins_ptr + row, bin)
            tl.store(targets_ptr + row, target - _at(sum_exp, bin + 1))


@triton.jit
def top_p_threshold_kernel(
    logits_ptr,  # fp32 [R * G, V]
    top_k_ptr,  # int32 [R]
    top_p_ptr,  # fp32 [R]
    edges_ptr,  # fp32 [R * G, BINS]
    max_ptr,  # fp32 [R * G]
    counts_ptr,  # int32 [R * G, BINS, parts]
    bins_ptr,  # int32 [R * G]
    members_ptr,  # fp32 [R * G, CAPACITY]
    thresholds_ptr,  # in and out: fp32 [R * G]
    targets_ptr,  # fp32 [R * G]
    vocab_size,  # V
    group_size,  # G
    num_parts,  # per row
    BINS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,  # parts, rounded up to a power of two
    CAPACITY: tl.constexpr,  # logits of a bin that are copied out
    BLOCK: tl.constexpr,  # logits that a search reads per iteration
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """Find top_p's threshold, which is not below top_k's. One program per row."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    _, _, _, has_top_p = restriction(top_k_ptr, top_p_ptr, row // group_size, vocab_size)
    if has_top_p:
        bin = tl.load(bins_ptr + row)
        lower, upper = _bounds(edges_ptr, row, bin, BINS)
        # Rounding can make the target exceed what top_k kept; the search then returns lower.
        lower = tl.maximum(lower, tl.load(thresholds_ptr + row))
        count = _totals(counts_ptr, row, num_parts, BINS, BLOCK_PARTS)
        num_members = _at(count, bin) - _at(count, bin + 1)
        x_ptr, num_x = _members(logits_ptr, row, vocab_size, members_ptr, num_members, CAPACITY)
        target, row_max = tl.load(targets_ptr + row), tl.load(max_ptr + row)
        tl.store(thresholds_ptr + row, search(x_ptr, num_x, lower, upper, target, row_max, True, BLOCK))


@triton.jit
def mask_logits_kernel(
    logits_ptr,  # in and out: fp32 [R * G, V]
    top_k_ptr,  # int32 [R]
    top_p_ptr,  # fp32 [R]
    thresholds_ptr,  # fp32 [R * G]
    vocab_size,  # V
    group_size,  # G
    num_parts,  # per row
    PART: tl.constexpr,  # logits per part
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """Set a part's logits below the row's threshold to -inf. A program takes parts of one row."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    _, _, has_top_k, has_top_p = restriction(top_k_ptr, top_p_ptr, row // group_size, vocab_size)
    if has_top_k | has_top_p:
        threshold = tl.load(thresholds_ptr + row)
        for part in range(tl.program_id(1), num_parts, tl.num_programs(1)):
            offs_v = part * PART + tl.arange(0, PART)
            x = _load(logits_ptr, row, offs_v, vocab_size)
            mask = (offs_v < vocab_size) & (x < threshold)
            tl.store(logits_ptr + row * vocab_size + offs_v, float("-inf"), mask=mask)


@triton.jit
def _load(logits_ptr, row, offs_v, vocab_size):
    """Load a row's logits at offs_v, -inf past its end."""
    return tl.load(logits_ptr + row * vocab_size + offs_v, mask=offs_v < vocab_size, other=float("-inf"))


@triton.jit
def _totals(
    values_ptr,  # [R * G, BINS, parts], counts or sums
    row,
    num_parts,
    BINS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Sum a row's counts or sums over its parts: totals from each edge on, [BINS]."""
    offs_bin = tl.arange(0, BINS)[:, None]
    offs_parts = tl.arange(0, BLOCK_PARTS)[None, :]
    value_ptrs = values_ptr + (row * BINS + offs_bin) * num_parts + offs_parts
    return tl.sum(tl.load(value_ptrs, mask=offs_parts < num_parts, other=0), 1)


@triton.jit
def _members_of_part(
    counts_ptr,  # int32 [R * G, BINS, parts]
    row,
    bin,
    part,
    num_parts,
    BINS: tl.constexpr,
):
    """Return how many members of a bin a part has."""
    count_ptrs = counts_ptr + (row * BINS + bin) * num_parts + part
    reached = tl.load(count_ptrs, mask=part < num_parts, other=0)
    return reached - tl.load(count_ptrs + num_parts, mask=(part < num_parts) & (bin + 1 < BINS), other=0)


@triton.jit
def _at(totals, bin):
    """Return the total from a bin's edge on; 0 past the last bin."""
    return tl.sum(tl.where(tl.arange(0, totals.shape[0]) == bin, totals, 0), 0)


@triton.jit
def _last_bin_reaching(totals, target):
    """Return the last bin with a total of at least `target` from its edge on, or the first if none has."""
    return tl.maximum(tl.sum((totals >= target).to(tl.int32), 0) - 1, 0)


@triton.jit
def _bounds(edges_ptr, row, bin, BINS: tl.constexpr):
    """Return a bin's edge and the next bin's."""
    edge_ptr = edges_ptr + row * BINS + bin
    return tl.load(edge_ptr), tl.load(edge_ptr + 1, mask=bin + 1 < BINS, other=float("inf"))


@triton.jit
def _members(
    logits_ptr,  # fp32 [R * G, V]
    row,
    vocab_size,  # V
    members_ptr,  # fp32 [R * G, CAPACITY]
    num_members,
    CAPACITY: tl.constexpr,
):
    """Return the pointer to a bin's members and the number to read: the whole row if they exceed CAPACITY."""
    x_ptr = members_ptr + row * CAPACITY
    if num_members > CAPACITY:
        x_ptr = logits_ptr + row * vocab_size
    return x_ptr, tl.where(num_members > CAPACITY, vocab_size, num_members)
