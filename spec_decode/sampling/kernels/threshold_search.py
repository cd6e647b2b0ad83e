"""A threshold among logits in memory, for the kernels of restrict_logits: by counting, or by mass.

With SHARES a logit x weighs exp(x - peak), where peak is the row's largest; else 1.
"""

from __future__ import annotations

from builders.kernels.triton_runtime import tl, triton


@triton.jit
def search(x, length, lower, upper, target, peak, SHARES: tl.constexpr, BLOCK: tl.constexpr):
    """A threshold from lower on that keeps as few logits of a bin, which ends at upper, as weigh `target`; lower if
    all from there on do not, or if lower lies behind the bin.

    Bisection of the floats between, which ends after 32 steps at most, whatever the logits are. A walk over memory
    takes as long as many steps over registers, so it also keeps what lies between the ends, and once nothing of that
    was lost, the search goes on among what was kept.
    """
    floor = _rank(lower)
    top = tl.minimum(_rank(upper), _rank(peak) + 1)
    pivot = _middle(floor, top)
    kept = tl.full((4 * BLOCK,), float("-inf"), tl.float32)
    lost = 1
    above = 0.0
    heavier = 0.0  # what weighs more than all that was kept: `above` as it was in that walk
    while (pivot > floor) & (lost > 0):
        heavier = above
        weight, kept, lost = walk(x, length, _float(pivot), _float(floor), _float(top), upper, peak, SHARES, BLOCK)
        above = tl.where(weight >= target, above, weight)
        floor, top = _narrowed(floor, top, pivot, weight, target)
        pivot = _middle(floor, top)
    while pivot > floor:
        weight = heavier + tl.sum(_weight(kept, kept >= _float(pivot), peak, SHARES), 0)
        floor, top = _narrowed(floor, top, pivot, weight, target)
        pivot = _middle(floor, top)
    return _float(floor)


@triton.jit
def _narrowed(floor, top, pivot, weight, target):
    """Ends such that what is not below floor weighs enough, and what is not below top too little, or just enough.

    The pivot becomes one of them whatever the weights are, NaN included, so that every search ends.
    """
    return tl.where(weight >= target, pivot, floor), tl.where(weight > target, top, pivot)


@triton.jit
def walk(x, length, pivot, floor, top, upper, peak, SHARES: tl.constexpr, BLOCK: tl.constexpr):
    """The weight of what lies from pivot to below upper; and what lies above floor and below top, fp32 [4 * BLOCK],
    the rest -inf, with 1 if some found no place there, else 0.

    A lane has place for the last four that it meets. Weights are added in an order that does not depend on the pivot,
    so that a smaller set never weighs more: counts below 2**24 are exact in fp32.
    """
    lane = tl.arange(0, BLOCK)
    weight = tl.zeros((BLOCK,), tl.float32)
    nothing = tl.full((BLOCK,), float("-inf"), tl.float32)
    first, second, third, fourth, lost = nothing, nothing, nothing, nothing, nothing
    for start in tl.range(0, length, BLOCK, loop_unroll_factor=2):
        value = tl.load(x + start + lane, mask=start + lane < length, other=float("-inf"))
        weight += _weight(value, (value >= pivot) & (value < upper), peak, SHARES)
        inside = (value > floor) & (value < top)
        lost = tl.where(inside, tl.maximum(lost, fourth), lost)
        fourth = tl.where(inside, third, fourth)
        third = tl.where(inside, second, third)
        second = tl.where(inside, first, second)
        first = tl.where(inside, value, first)
    kept = tl.join(tl.join(first, second), tl.join(third, fourth)).reshape(4 * BLOCK, can_reorder=True)
    return tl.sum(weight, 0), kept, (tl.max(lost, 0) > float("-inf")).to(tl.int32)


@triton.jit
def _weight(value, taken, peak, SHARES: tl.constexpr):
    return tl.where(taken, tl.exp(value - peak) if SHARES else 1.0, 0.0)


@triton.jit
def _rank(value):
    """A float's int32, ordered as floats are; of both zeros, which are equal, the larger."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _float(rank):
    return (rank ^ ((rank >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _middle(floor, top):
    """Rounded down, and no overflow: floor itself where nothing lies between."""
    return (floor & top) + ((floor ^ top) >> 1)
