"""Top-k and top-p: take the tokens that may not be sampled out of rows of logits."""

from __future__ import annotations

import torch

from builders._ops import define_op
from builders._triton import tl, triton
from builders.errors import require, require_tensor

_BLOCK = 4096


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


def _launch(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> None:
    rows, vocab = logits.shape
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    _restrict_kernel[(rows,)](
        logits, top_k, top_p, vocab, rows // len(top_k), BLOCK=block, num_warps=max(1, min(16, block // 128))
    )


@triton.jit
def _restrict_kernel(logits, top_k, top_p, vocab, group, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.load(top_k + row // group)
    p = tl.load(top_p + row // group)
    few = (k > 0) & (k < vocab)
    if few | (p < 1):
        x = logits + row * vocab
        low, high = _extent(x, vocab, BLOCK)
        threshold = low
        if few:
            threshold = _threshold(x, low, high, k.to(tl.float32), vocab, False, BLOCK)
        if p < 1:
            threshold = _threshold(x, threshold, high, p, vocab, True, BLOCK)
        _cut(x, threshold, vocab, BLOCK)


@triton.jit
def _threshold(x, low, high, target, vocab, SHARES: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit from low to high such that those not below it weigh at least `target`, or low if none does.

    A logit weighs 1, or if SHARES its part of the probability of all from low on; high is the largest of the row.

    Bisection whose ends are logits that occur: each pass drops one at least, and the last is met exactly. A pass over
    the row takes as long as many over registers, so it also keeps what lies between the ends, and once nothing of that
    was lost, the search goes on among what was kept.
    """
    peak = high
    kept = tl.full((4 * BLOCK,), float("-inf"), tl.float32)
    lost = 1
    above_high = 0.0
    heavier = 0.0  # what weighs more than all that was kept: above_high as it was in that pass
    if SHARES:
        whole, _, _, kept, lost = _weigh_row(x, low, low, high, peak, vocab, True, BLOCK)
        target *= whole
    while (low < high) & (lost > 0):
        pivot = _middle(low, high)
        heavier = above_high
        weight, above, below, kept, lost = _weigh_row(x, pivot, low, high, peak, vocab, SHARES, BLOCK)
        above_high = tl.where(weight >= target, above_high, weight)
        low, high = _narrowed(low, high, weight, target, above, below)
    while low < high:
        pivot = _middle(low, high)
        weight, above, below = _weigh(kept, pivot, peak, SHARES)
        low, high = _narrowed(low, high, heavier + tl.sum(weight, 0), target, tl.min(above, 0), tl.max(below, 0))
    return low


@triton.jit
def _middle(low, high):
    middle = 0.5 * low + 0.5 * high
    return tl.where(middle > low, middle, high)


@triton.jit
def _narrowed(low, high, weight, target, above, below):
    enough = weight >= target
    return tl.where(enough, above, low), tl.where(enough, tl.where(weight == target, above, high), below)


@triton.jit
def _weigh_row(x, pivot, low, high, peak, vocab, SHARES: tl.constexpr, BLOCK: tl.constexpr):
    """The weight of a row's logits not below pivot, the least of them, and the largest of the others; and those above
    low up to high, fp32 [4 * BLOCK], the rest -inf, with 1 if some found no place there, else 0.

    A lane has place for the last four that it meets. Weights are added in an order that does not depend on the pivot,
    so that a smaller set never weighs more: counts below 2**24 are exact in fp32.
    """
    lane = tl.arange(0, BLOCK)
    weight = tl.zeros((BLOCK,), tl.float32)
    above = tl.full((BLOCK,), float("inf"), tl.float32)
    nothing = tl.full((BLOCK,), float("-inf"), tl.float32)
    below, lost = nothing, nothing
    first, second, third, fourth = nothing, nothing, nothing, nothing
    for start in tl.range(0, vocab, BLOCK, loop_unroll_factor=2):
        value = tl.load(x + start + lane, mask=start + lane < vocab, other=float("-inf"))
        more, least, most = _weigh(value, pivot, peak, SHARES)
        weight += more
        above = tl.minimum(above, least)
        below = tl.maximum(below, most)
        inside = (value > low) & (value <= high)
        lost = tl.where(inside, tl.maximum(lost, fourth), lost)
        fourth = tl.where(inside, third, fourth)
        third = tl.where(inside, second, third)
        second = tl.where(inside, first, second)
        first = tl.where(inside, value, first)
    kept = tl.join(tl.join(first, second), tl.join(third, fourth)).reshape(4 * BLOCK, can_reorder=True)
    some_lost = (tl.max(lost, 0) > float("-inf")).to(tl.int32)
    return tl.sum(weight, 0), tl.min(above, 0), tl.max(below, 0), kept, some_lost


@triton.jit
def _weigh(value, pivot, peak, SHARES: tl.constexpr):
    """Of each logit: its weight, and itself as one of those not below pivot (else inf) or of the others (else -inf)."""
    taken = value >= pivot
    weight = tl.where(taken, tl.exp(value - peak) if SHARES else 1.0, 0.0)
    return weight, tl.where(taken, value, float("inf")), tl.where(value < pivot, value, float("-inf"))


@triton.jit
def _extent(x, vocab, BLOCK: tl.constexpr):
    """The least and the largest logit that is not -inf."""
    lane = tl.arange(0, BLOCK)
    low = tl.full((BLOCK,), float("inf"), tl.float32)
    high = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        value = tl.load(x + start + lane, mask=start + lane < vocab, other=float("-inf"))
        low = tl.where(value > float("-inf"), tl.minimum(low, value), low)
        high = tl.where(value > high, value, high)
    return tl.min(low, 0), tl.max(high, 0)


@triton.jit
def _cut(x, threshold, vocab, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    for start in range(0, vocab, BLOCK):
        inside = start + lane < vocab
        value = tl.load(x + start + lane, mask=inside, other=0.0)
        tl.store(x + start + lane, float("-inf"), mask=inside & (value < threshold))


_restrict_op = define_op(
    "spec_decode::restrict_logits",
    "(Tensor(a!) logits, Tensor top_k, Tensor top_p) -> ()",
    cpu=_restrict,
    cuda=_launch,
)
