"""Top-k, top-p and min-p: set the logits of excluded tokens to -inf.

A sample of the row tells roughly where the threshold is: in a window of logits, few enough to be copied out and
searched by one program. If the sample misled, or too many logits lie in the window, that program searches the whole
row: slower, with the same result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from builders.errors import require, require_tensor
from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling.kernels.process_logits import is_restricted, restriction
from spec_decode.sampling.kernels.threshold_search import (
    LEAST,
    as_float,
    as_rank,
    bracket,
    middle,
    narrowed,
    search,
    share_of,
    walk,
    weigh,
    weight_of,
)

_PART = 1024
"""Logits of a part, the unit that a program takes: few enough that a single row keeps many SMs busy."""

_PROGRAMS = 2048
"""Programs that keep a device busy: more would only add launch time for rows without a restriction."""

_SAMPLE = 4096
"""Logits of a row that choose the window. With 151,936 tokens and top_k 50, about 500 lie in it."""

_CAPACITY = 16384
"""The most logits of a window that are copied out for the search; if it holds more, the search reads the whole row."""

_BLOCK = 512
"""Logits that a search reads at once; it keeps four times as many in registers."""


def restrict_logits(logits: torch.Tensor, *, top_k: torch.Tensor, top_p: torch.Tensor, min_log_p: torch.Tensor) -> None:
    """Write -inf, in place, where a token is outside its row's top_k or min_p, or outside top_p of what they left.

    - logits     fp32 [R * G, V], contiguous, already divided by the temperature; G consecutive rows per request
    - top_k      int32 [R]; off if 0, or V or more
    - top_p      fp32 [R]; off if 1 or more
    - min_log_p  fp32 [R], log(min_p), at most 0; off if -inf

    A row with all off is not read. min_p keeps logits of at least the largest plus log(min_p), and top_k those of at
    least the k-th largest; top_p then keeps the fewest most probable tokens that hold at least that share of what they
    left (Holtzman et al., 2020, section 3.1). Tokens with equal logits stay or go together, so the result depends on no
    order: a tie at the threshold keeps more than k tokens, or more than the fewest. The most probable token always
    stays. Shares at top_p's threshold are summed in fp64 on the CPU. On CUDA they are summed as integers, of a total in
    fp32: the result is the same in every run.

    Raises BatchError, with nothing written, for tensors of the wrong shape, dtype, device or layout.
    """
    rows = len(top_k)
    require_tensor("logits", logits, shape=(None, None), dtype=torch.float32, device=logits.device)
    require_tensor("top_k", top_k, shape=(rows,), dtype=torch.int32, device=logits.device)
    require_tensor("top_p", top_p, shape=(rows,), dtype=torch.float32, device=logits.device)
    require_tensor("min_log_p", min_log_p, shape=(rows,), dtype=torch.float32, device=logits.device)
    require(
        rows > 0 and len(logits) % rows == 0 and logits.is_contiguous(),
        f"logits must be contiguous, with equally many rows for each of {rows} requests, got {len(logits)} rows of "
        f"strides {logits.stride()}; top_k and top_p would restrict another request's rows. Pass [requests * tokens, "
        "vocabulary].",
    )
    _restrict_logits(logits, top_k, top_p, min_log_p)


class RestrictLogits(NamedTuple):
    """The arguments of the op; restrict_logits documents them."""

    logits: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_log_p: torch.Tensor

    def reference(self) -> None:
        vocab, group = self.logits.shape[1], len(self.logits) // len(self.top_k)
        restricted = (
            is_restricted(self.top_k, self.top_p, self.min_log_p, vocab).repeat_interleave(group).nonzero()[:, 0]
        )
        if not len(restricted):  # a sort of rows that nothing restricts would take most of a greedy round
            return
        k = self.top_k.long()[restricted // group, None]
        p = self.top_p[restricted // group, None]
        k = torch.where(k > 0, k, vocab).clamp(max=vocab)
        logits = self.logits[restricted]
        ranked = logits.double().sort(-1, descending=True).values
        least = logits.amax(-1, keepdim=True) + self.min_log_p[restricted // group, None]
        least = torch.maximum(ranked.gather(1, k - 1), least.double())
        share = ranked.masked_fill(ranked < least, -torch.inf).softmax(-1).cumsum(-1)
        last = (share < p).sum(-1, keepdim=True).clamp(max=vocab - 1)
        threshold = torch.where(p < 1, torch.maximum(least, ranked.gather(1, last)), least)
        self.logits[restricted] = logits.masked_fill(logits < threshold, -torch.inf)

    def launch(self) -> None:
        (rows, vocab), device = self.logits.shape, self.logits.device
        part = min(_PART, next_power_of_2(vocab))
        parts = cdiv(vocab, part)
        sample = min(_SAMPLE, next_power_of_2(vocab))
        block = min(_BLOCK, part)
        capacity = min(_CAPACITY, vocab)
        part_range = {"PART": part, "num_warps": max(1, min(8, part // 128))}
        choose = {"SAMPLE": sample, "BLOCK_PARTS": next_power_of_2(parts), "num_warps": max(1, min(8, sample // 128))}
        find = {"BLOCK_PARTS": next_power_of_2(parts), "BLOCK": block, "num_warps": max(1, block // 128)}

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        # Intermediate results between the kernels; not written for a row without a restriction.
        part_max = empty(rows, parts)  # the largest logit of a part, unless top_k is on
        part_sum = empty(rows, parts)  # the part's sum of exponentials, relative to that
        windows = empty(rows, 2)  # the window's least logit, and the least above it
        maxima = empty(rows, dtype=torch.int32)  # the rank of the row's largest logit
        counts = empty(rows, 2, dtype=torch.int32)  # logits in the window, and above it
        weights = empty(rows, 2, dtype=torch.int64)  # from the window on, and above it, if top_p alone is on
        members = empty(rows, capacity)  # the logits in the window, in any order
        thresholds = empty(rows)  # the least logit that stays

        row: dict[str, Any] = {"logits_ptr": self.logits, "top_k_ptr": self.top_k, "top_p_ptr": self.top_p}
        row |= {
            "min_log_p_ptr": self.min_log_p,
            "vocab_size": vocab,
            "group_size": rows // len(self.top_k),
            "num_parts": parts,
        }
        shares = {"part_max_ptr": part_max, "part_sum_ptr": part_sum}
        window = {"windows_ptr": windows, "maxima_ptr": maxima}
        totals = {"counts_ptr": counts, "weights_ptr": weights}
        found = {"members_ptr": members, "CAPACITY": capacity}
        by_part, by_row = (rows, min(parts, max(1, _PROGRAMS // rows))), (rows,)
        pdl = dependent_launch(device)
        sum_parts_kernel[by_part](**row, **shares, maxima_ptr=maxima, **totals, **part_range, **pdl)
        choose_window_kernel[by_row](**row, **shares, **window, **choose, **pdl)
        gather_window_kernel[by_part](**row, **window, **totals, **found, **part_range, **pdl)
        find_threshold_kernel[by_row](
            **row, **shares, **window, **totals, **found, thresholds_ptr=thresholds, **find, **pdl
        )
        mask_logits_kernel[by_part](**row, thresholds_ptr=thresholds, **part_range, **pdl)


_restrict_logits = define_op("spec_decode::restrict_logits", RestrictLogits, mutates=("logits",))


_RUN = tl.constexpr(8)  # consecutive logits of a sample: a sector of memory


@triton.jit
def sum_parts_kernel(
    logits_ptr,  # fp32 [R * G, V]
    top_k_ptr,  # int32 [R]
    top_p_ptr,  # fp32 [R]
    min_log_p_ptr,  # fp32 [R]
    part_max_ptr,  # out: fp32 [R * G, parts]
    part_sum_ptr,  # out: fp32 [R * G, parts]
    maxima_ptr,  # out: int32 [R * G]
    counts_ptr,  # out: int32 [R * G, 2]
    weights_ptr,  # out: int64 [R * G, 2]
    vocab_size,  # V
    group_size,  # G
    num_parts,  # per row
    PART: tl.constexpr,  # logits per part
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """Without top_k, store each part's largest logit and its sum of exponentials relative to that. Start the row's
    totals. A program takes parts of one row.
    """
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    _, _, _, has_top_k, has_top_p, has_min_p = restriction(
        top_k_ptr, top_p_ptr, min_log_p_ptr, row // group_size, vocab_size
    )
    if (tl.program_id(1) == 0) & (has_top_k | has_top_p | has_min_p):
        offs_pair = row * 2 + tl.arange(0, 2)
        tl.store(maxima_ptr + row, as_rank(float("-inf")))
        tl.store(counts_ptr + offs_pair, tl.zeros((2,), tl.int32))
        tl.store(weights_ptr + offs_pair, tl.zeros((2,), tl.int64))
    if (has_top_p | has_min_p) & (not has_top_k):
        for part in range(tl.program_id(1), num_parts, tl.num_programs(1)):
            x = _load(logits_ptr, row, part * PART + tl.arange(0, PART), vocab_size)
            part_max = _max(x)
            # Of a part of -inf alone, -inf less -inf would be NaN.
            part_sum = tl.sum(tl.exp(x - tl.maximum(part_max, LEAST)), 0)
            tl.store(part_max_ptr + row * num_parts + part, part_max)
            tl.store(part_sum_ptr + row * num_parts + part, part_sum)


@triton.jit
def choose_window_kernel(
    logits_ptr,  # fp32 [R * G, V]
    top_k_ptr,  # int32 [R]
    top_p_ptr,  # fp32 [R]
    min_log_p_ptr,  # fp32 [R]
    part_max_ptr,  # fp32 [R * G, parts]
    part_sum_ptr,  # fp32 [R * G, parts]
    windows_ptr,  # out: fp32 [R * G, 2]
    maxima_ptr,  # out: int32 [R * G]
    vocab_size,  # V
    group_size,  # G
    num_parts,  # per row
    SAMPLE: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,  # parts, rounded up to a power of two
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """Choose the window by a sample spread over the row; with min_p and no top_k, all that min_p keeps. One program
    per row."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    k, p, m, has_top_k, has_top_p, has_min_p = restriction(
        top_k_ptr, top_p_ptr, min_log_p_ptr, row // group_size, vocab_size
    )
    if has_min_p & (not has_top_k):
        row_max, _ = _row_sum(part_max_ptr, part_sum_ptr, row, num_parts, BLOCK_PARTS)
        tl.store(maxima_ptr + row, as_rank(row_max))
        tl.store(windows_ptr + row * 2, tl.maximum(row_max + m, LEAST))
        tl.store(windows_ptr + row * 2 + 1, float("inf"))
    elif has_top_k | has_top_p:
        offs_v = tl.arange(0, SAMPLE).to(tl.int64)
        if vocab_size > SAMPLE:
            offs_v = offs_v // _RUN * vocab_size // (SAMPLE // _RUN) + offs_v % _RUN
        x = _load(logits_ptr, row, offs_v, vocab_size)
        sampled = tl.minimum(SAMPLE / vocab_size, 1.0)
        # 1. How many of the sample probably stay
        if has_top_k:
            rank = k * sampled
        else:
            row_max, total = _row_sum(part_max_ptr, part_sum_ptr, row, num_parts, BLOCK_PARTS)
            tl.store(maxima_ptr + row, as_rank(row_max))
            # All logits below this together weigh less than 1 - p times the weight of the largest logit.
            least = as_rank(tl.maximum(row_max - tl.log(vocab_size / (1.0 - p)), LEAST))
            weight, excluded = tl.exp(x - row_max), (1.0 - p) * total * sampled
            above = as_rank(row_max) + 1
            pivot = middle(least, above)
            while pivot > least:
                below = tl.sum(tl.where(x < as_float(pivot), weight, 0.0), 0)
                least, above = narrowed(least, above, pivot, -below, -1.1 * excluded, -0.9 * excluded)
                pivot = middle(least, above)
            rank = tl.sum((x >= as_float(least)).to(tl.float32), 0)
        # 2. The window around that many of the sample, wide enough that a sample hardly ever misses the threshold
        margin = 4.0 * tl.sqrt(rank) + 8.0
        end = as_rank(_max(x)) + 1
        low_rank, _ = bracket(x, as_rank(LEAST), end, rank + margin, rank + 1.25 * margin)
        low, high = as_float(low_rank), float("inf")
        # After top_k, top_p's threshold may be anywhere among the logits that stay.
        if (rank > margin) & (not (has_top_k & has_top_p)):
            _, high_rank = bracket(x, low_rank, end, rank - 1.25 * margin, rank - margin)
            high = as_float(high_rank)
        tl.store(windows_ptr + row * 2, low)
        tl.store(windows_ptr + row * 2 + 1, high)


# Of a vocabulary that is a multiple of 16, Triton would give a thread four consecutive logits. To store the few of them
# that lie in the window, it would then move all of them through shared memory.
@triton.jit(do_not_specialize=["vocab_size"])
def gather_window_kernel(
    logits_ptr,  # fp32 [R * G, V]
    top_k_ptr,  # int32 [R]
    top_p_ptr,  # fp32 [R]
    min_log_p_ptr,  # fp32 [R]
    windows_ptr,  # fp32 [R * G, 2]
    maxima_ptr,  # in and out: int32 [R * G]
    counts_ptr,  # in and out: int32 [R * G, 2]
    weights_ptr,  # in and out: int64 [R * G, 2]
    members_ptr,  # out: fp32 [R * G, CAPACITY]
    vocab_size,  # V
    group_size,  # G
    num_parts,  # per row
    CAPACITY: tl.constexpr,  # logits of a window that are copied out
    PART: tl.constexpr,  # logits per part
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """Copy out the logits in the window, up to CAPACITY; count those in it and above it, and without top_k sum their
    weights. min_p alone needs none of this. Only integers are added across programs, so their order does not matter. A
    program takes parts of one row.
    """
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    _, _, _, has_top_k, has_top_p, _ = restriction(top_k_ptr, top_p_ptr, min_log_p_ptr, row // group_size, vocab_size)
    if has_top_k | has_top_p:
        low, high = tl.load(windows_ptr + row * 2), tl.load(windows_ptr + row * 2 + 1)
        row_max = as_float(tl.load(maxima_ptr + row))
        largest = tl.full((PART,), float("-inf"), tl.float32)
        num_above = tl.zeros((PART,), tl.int32)
        count_ptrs = counts_ptr + row * 2 + tl.zeros((PART,), tl.int32)
        weight_from_low, weight_above = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
        for part in range(tl.program_id(1), num_parts, tl.num_programs(1)):
            x = _load(logits_ptr, row, part * PART + tl.arange(0, PART), vocab_size)
            inside, above = (x >= low) & (x < high), x >= high
            # One by one: to compact a part first costs more, unless thousands of a row lie in the window.
            slot = tl.atomic_add(count_ptrs, 1, mask=inside, sem="relaxed")
            tl.store(members_ptr + row * CAPACITY + slot, x, mask=inside & (slot < CAPACITY))
            if has_top_k:
                largest = tl.where(x > largest, x, largest)
                num_above += above.to(tl.int32)
            else:
                weight = weigh(x, x >= low, row_max, True)
                weight_from_low += tl.sum(weight, 0)
                weight_above += tl.sum(tl.where(above, weight, 0), 0)
        if has_top_k:
            tl.atomic_max(maxima_ptr + row, as_rank(tl.max(largest, 0)), sem="relaxed")
            tl.atomic_add(counts_ptr + row * 2 + 1, tl.sum(num_above, 0), sem="relaxed")
        else:
            tl.atomic_add(weights_ptr + row * 2, weight_from_low, sem="relaxed")
            tl.atomic_add(weights_ptr + row * 2 + 1, weight_above, sem="relaxed")


@triton.jit
def find_threshold_kernel(
    logits_ptr,  # fp32 [R * G, V]
    top_k_ptr,  # int32 [R]
    top_p_ptr,  # fp32 [R]
    min_log_p_ptr,  # fp32 [R]
    part_max_ptr,  # fp32 [R * G, parts]
    part_sum_ptr,  # fp32 [R * G, parts]
    windows_ptr,  # fp32 [R * G, 2]
    maxima_ptr,  # int32 [R * G]
    counts_ptr,  # int32 [R * G, 2]
    weights_ptr,  # int64 [R * G, 2]
    members_ptr,  # fp32 [R * G, CAPACITY]
    thresholds_ptr,  # out: fp32 [R * G]
    vocab_size,  # V
    group_size,  # G
    num_parts,  # per row
    BLOCK_PARTS: tl.constexpr,  # parts, rounded up to a power of two
    CAPACITY: tl.constexpr,  # logits of a window that are copied out
    BLOCK: tl.constexpr,  # logits that a search reads per iteration
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """Find top_k's threshold, then min_p's and top_p's, which are not below it. One program per row."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    k, p, m, has_top_k, has_top_p, has_min_p = restriction(
        top_k_ptr, top_p_ptr, min_log_p_ptr, row // group_size, vocab_size
    )
    if has_min_p & (not (has_top_k | has_top_p)):
        tl.store(thresholds_ptr + row, tl.load(windows_ptr + row * 2))
    elif has_top_k | has_top_p:
        low, high = tl.load(windows_ptr + row * 2), tl.load(windows_ptr + row * 2 + 1)
        num_inside, num_above = tl.load(counts_ptr + row * 2), tl.load(counts_ptr + row * 2 + 1)
        max_rank = tl.load(maxima_ptr + row)
        row_max = as_float(max_rank)
        target = tl.full((), 0, tl.int64)
        # 1. Does the window hold the threshold? A window from the lowest float on ends where the row does.
        if has_top_k:
            missed = (num_above >= k) | ((num_above + num_inside < k) & (low > LEAST))
        else:
            _, total = _row_sum(part_max_ptr, part_sum_ptr, row, num_parts, BLOCK_PARTS)
            from_low, above = tl.load(weights_ptr + row * 2), tl.load(weights_ptr + row * 2 + 1)
            # The window of min_p holds all of which top_p is a share, so it never misses.
            target = share_of(p, tl.where(has_min_p, from_low, weight_of(total)))
            missed = (above >= target) | ((from_low < target) & (low > LEAST))
            target -= tl.where(missed, 0, above)
        low, high = tl.where(missed, LEAST, low), tl.where(missed, float("inf"), high)
        x_ptr, num_x = members_ptr + row * CAPACITY, num_inside
        if missed | (num_inside > CAPACITY):
            x_ptr, num_x = logits_ptr + row * vocab_size, vocab_size
        # 2. The thresholds
        if has_top_k:
            k -= tl.where(missed, 0, num_above)
            low = search(x_ptr, num_x, low, high, k, max_rank, False, BLOCK)
            low = tl.where(has_min_p, tl.maximum(low, row_max + m), low)
            if has_top_p:
                kept, _, _ = walk(x_ptr, num_x, low, low, high, high, row_max, True, BLOCK)
                target = share_of(p, kept)
        if has_top_p:
            # Rounding can make the target exceed what there is; the search then returns the lower bound.
            low = search(x_ptr, num_x, low, high, target, max_rank, True, BLOCK)
        tl.store(thresholds_ptr + row, low)


@triton.jit
def mask_logits_kernel(
    logits_ptr,  # in and out: fp32 [R * G, V]
    top_k_ptr,  # int32 [R]
    top_p_ptr,  # fp32 [R]
    min_log_p_ptr,  # fp32 [R]
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
    _, _, _, has_top_k, has_top_p, has_min_p = restriction(
        top_k_ptr, top_p_ptr, min_log_p_ptr, row // group_size, vocab_size
    )
    if has_top_k | has_top_p | has_min_p:
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
def _max(x):
    """Return the largest, or -inf, of logits that may be NaN."""
    return tl.max(tl.where(x > float("-inf"), x, float("-inf")), 0)


@triton.jit
def _row_sum(
    part_max_ptr,  # fp32 [R * G, parts]
    part_sum_ptr,  # fp32 [R * G, parts]
    row,
    num_parts,
    BLOCK_PARTS: tl.constexpr,
):
    """Return a row's largest logit, and its sum of exponentials relative to that."""
    offs_parts = tl.arange(0, BLOCK_PARTS)
    part_offs, mask = row * num_parts + offs_parts, offs_parts < num_parts
    part_max = tl.load(part_max_ptr + part_offs, mask=mask, other=float("-inf"))
    row_max = tl.max(part_max, 0)
    part_sum = tl.load(part_sum_ptr + part_offs, mask=mask, other=0.0)
    return row_max, tl.sum(part_sum * tl.exp(part_max - tl.maximum(row_max, LEAST)), 0)
