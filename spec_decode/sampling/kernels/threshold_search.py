"""Search for a threshold among logits in memory, for the kernels of restrict_logits.

With SUM_EXP a logit x has the weight exp(x - row_max), where row_max is the row's largest logit; else 1.
"""

from __future__ import annotations

from builders.kernels.triton_runtime import tl, triton


@triton.jit
def search(
    x_ptr,  # fp32 [length]
    length,
    lower,
    upper,
    target,
    row_max,
    SUM_EXP: tl.constexpr,
    BLOCK: tl.constexpr,  # logits read per iteration
):
    """Return the highest threshold >= lower with a total weight of at least `target` for the bin's logits at or above.

    The bin ends at upper. Returns lower if its logits from lower on weigh less, or if lower is past the bin.

    This bisects the floats in between, in at most 32 steps for any logits. A pass over memory costs as much as many
    steps over registers. So a pass also keeps the logits between the bounds, and once all of them fit in registers the
    search continues there.
    """
    low = _rank(lower)
    high = tl.minimum(_rank(upper), _rank(row_max) + 1)
    pivot = _middle(low, high)
    kept = tl.full((4 * BLOCK,), float("-inf"), tl.float32)
    lost = 1
    above = 0.0
    base = 0.0  # the weight of all logits above the kept ones: `above` at that pass
    # Passes over memory, until the logits between the bounds fit
    while (pivot > low) & (lost > 0):
        base = above
        low_x, high_x = _float(low), _float(high)
        weight, kept, lost = walk(x_ptr, length, _float(pivot), low_x, high_x, upper, row_max, SUM_EXP, BLOCK)
        above = tl.where(weight >= target, above, weight)
        low, high = _narrowed(low, high, pivot, weight, target)
        pivot = _middle(low, high)
    # Steps over registers
    while pivot > low:
        weight = base + tl.sum(_weight(kept, kept >= _float(pivot), row_max, SUM_EXP), 0)
        low, high = _narrowed(low, high, pivot, weight, target)
        pivot = _middle(low, high)
    return _float(low)


@triton.jit
def _narrowed(low, high, pivot, weight, target):
    """Return bounds such that logits from low on weigh enough, and logits from high on too little, or just enough.

    The pivot becomes one of the bounds for any weights, including NaN, so every search terminates.
    """
    return tl.where(weight >= target, pivot, low), tl.where(weight > target, high, pivot)


@triton.jit
def walk(
    x_ptr,  # fp32 [length]
    length,
    pivot,
    low,
    high,
    upper,
    row_max,
    SUM_EXP: tl.constexpr,
    BLOCK: tl.constexpr,  # logits read per iteration
):
    """Return the weight of the logits in [pivot, upper); the logits in (low, high), fp32 [4 * BLOCK], padded with -inf;
    and 1 if some of those did not fit, else 0.

    A lane keeps the last four that it meets. Weights are added in an order that does not depend on the pivot, so a
    smaller set never weighs more; counts below 2**24 are exact in fp32.
    """
    lane = tl.arange(0, BLOCK)
    weight = tl.zeros((BLOCK,), tl.float32)
    nothing = tl.full((BLOCK,), float("-inf"), tl.float32)
    first, second, third, fourth, lost = nothing, nothing, nothing, nothing, nothing
    for start in tl.range(0, length, BLOCK, loop_unroll_factor=2):
        x = tl.load(x_ptr + start + lane, mask=start + lane < length, other=float("-inf"))
        weight += _weight(x, (x >= pivot) & (x < upper), row_max, SUM_EXP)
        inside = (x > low) & (x < high)
        lost = tl.where(inside, tl.maximum(lost, fourth), lost)
        fourth = tl.where(inside, third, fourth)
        third = tl.where(inside, second, third)
        second = tl.where(inside, first, second)
        first = tl.where(inside, x, first)
    kept = tl.join(tl.join(first, second), tl.join(third, fourth)).reshape(4 * BLOCK, can_reorder=True)
    return tl.sum(weight, 0), kept, (tl.max(lost, 0) > float("-inf")).to(tl.int32)


@triton.jit
def _weight(x, counted, row_max, SUM_EXP: tl.constexpr):
    """Return the weight of each counted logit, else 0."""
    return tl.where(counted, tl.exp(x - row_max) if SUM_EXP else 1.0, 0.0)


@triton.jit
def _rank(x):
    """Map a float to an int32 with the same order; both zeros map to the larger rank."""
    ALL_BUT_SIGN: tl.constexpr = 0x7FFFFFFF
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & ALL_BUT_SIGN)


@triton.jit
def _float(rank):
    """Return the float of a rank."""
    ALL_BUT_SIGN: tl.constexpr = 0x7FFFFFFF
    return (rank ^ ((rank >> 31) & ALL_BUT_SIGN)).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    """Return the midpoint, rounded down, without overflow: low if nothing lies between."""
    return (low & high) + ((low ^ high) >> 1)
