"""Top-k and top-p: take the tokens that may not be sampled out of rows of logits."""

from __future__ import annotations

import torch

from builders._ops import define_op
from builders._triton import tl, triton
from builders.errors import require, require_tensor

_BLOCK = 8192


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
        logits, top_k, top_p, vocab, rows // len(top_k), BLOCK=block, num_warps=32 if block == _BLOCK else 4
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
            threshold = _threshold(x, low, high, k.to(tl.float32), high, vocab, False, BLOCK)
        if p < 1:
            whole, _, _ = _weigh(x, threshold, high, vocab, True, BLOCK)
            threshold = _threshold(x, threshold, high, p * whole, high, vocab, True, BLOCK)
        _cut(x, threshold, vocab, BLOCK)


@triton.jit
def _threshold(x, low, high, target, peak, vocab, PROBABLE: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit from low to high such that those not below it weigh at least `target`, or low if none does.

    Bisection whose ends are logits that occur: each pass drops one at least, and the last is met exactly.
    """
    while low < high:
        middle = 0.5 * low + 0.5 * high
        pivot = tl.where(middle > low, middle, high)
        weight, above, below = _weigh(x, pivot, peak, vocab, PROBABLE, BLOCK)
        enough = weight >= target
        low = tl.where(enough, above, low)
        high = tl.where(enough, tl.where(weight == target, above, high), below)
    return low


@triton.jit
def _weigh(x, pivot, peak, vocab, PROBABLE: tl.constexpr, BLOCK: tl.constexpr):
    """The weight of the logits not below pivot, the least of them, and the largest of the others.

    A weight is exp(x - peak) if PROBABLE and 1 if not: counts below 2**24 are exact in fp32. Weights are added in an
    order that does not depend on the pivot, so that a smaller set never weighs more.
    """
    lane = tl.arange(0, BLOCK)
    weight = tl.zeros((BLOCK,), tl.float32)
    above = tl.full((BLOCK,), float("inf"), tl.float32)
    below = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        value = tl.load(x + start + lane, mask=start + lane < vocab, other=float("-inf"))
        taken = value >= pivot
        weight += tl.where(taken, tl.exp(value - peak) if PROBABLE else 1.0, 0.0)
        above = tl.where(taken, tl.minimum(above, value), above)
        below = tl.where(value < pivot, tl.maximum(below, value), below)
    return tl.sum(weight, 0), tl.min(above, 0), tl.max(below, 0)


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
