"""Search for a threshold among logits, for the kernels of restrict_logits.

With SUM_EXP a logit x weighs exp(x - row_max), where row_max is the row's largest logit, in units of 2**-40, rounded
down to an integer; else 1. A sum of integers does not depend on the order of its terms.
"""

from __future__ import annotations

from builders.kernels.triton_runtime import tl, triton

LEAST = tl.constexpr(-3.4028234663852886e38)  # the lowest finite fp32
_UNITS = tl.constexpr(2.0**40)  # the weight of the largest logit: 2**22 of them still fit in int64


@triton.jit
def search(
    x_ptr,  # fp32 [length]
    length,
    lower,
    upper,
    target,  # int32; int64 with SUM_EXP
    max_rank,  # of the row's largest logit
    SUM_EXP: tl.constexpr,
    BLOCK: tl.constexpr,  # logits read per iteration
):
    """Return the highest threshold >= lower such that the logits in [threshold, upper) weigh at least `target`.

    Returns lower if the logits from lower on weigh less, or if lower is past upper; never more than the largest logit.

    This bisects the floats in between, in at most 32 steps for any logits. A pass over memory costs as much as many
    steps over registers. So a pass also keeps the logits between the bounds, and once all of them fit in registers the
    search continues there.
    """
    row_max = as_float(max_rank)
    low = as_rank(lower)
    high = tl.minimum(as_rank(upper), max_rank + 1)
    pivot = middle(low, high)
    kept = tl.full((4 * BLOCK,), float("-inf"), tl.float32)
    lost = 1
    # Two zeros: if both names had one value, Triton 3.6 would lose `base` after the loop.
    above = target * 0
    base = target * 0  # the weight of all logits above the kept ones: `above` at that pass
    # Passes over memory, until the logits between the bounds fit
    while (pivot > low) & (lost > 0):
        base = above
        low_x, high_x = as_float(low), as_float(high)
        weight, kept, lost = walk(x_ptr, length, as_float(pivot), low_x, high_x, upper, row_max, SUM_EXP, BLOCK)
        above = tl.where(weight >= target, above, weight)
        low, high = narrowed(low, high, pivot, weight, target, target)
        pivot = middle(low, high)
    # Steps over registers
    weights = weigh(kept, kept > float("-inf"), row_max, SUM_EXP)
    while pivot > low:
        weight = base + tl.sum(tl.where(kept >= as_float(pivot), weights, 0), 0)
        low, high = narrowed(low, high, pivot, weight, target, target)
        pivot = middle(low, high)
    return as_float(low)


@triton.jit
def bracket(x, low, high, least, most):
    """Narrow the ranks low and high until, if ties allow, `least` to `most` of x are at or above both; else at least
    `least` are at or above low, and at most `most` at or above high. Bounds that hold this already are needed."""
    pivot = middle(low, high)
    while pivot > low:
        count = tl.sum((x >= as_float(pivot)).to(tl.float32), 0)
        low, high = narrowed(low, high, pivot, count, least, most)
        pivot = middle(low, high)
    return low, high


@triton.jit
def narrowed(low, high, pivot, weight, least, most):
    """Return bounds such that logits from low on weigh at least `least`, and logits from high on at most `most`.

    The pivot becomes one of the bounds for any weights, including NaN, so every search terminates.
    """
    return tl.where(weight >= least, pivot, low), tl.where(weight > most, high, pivot)


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

    A lane keeps the last four that it meets.
    """
    lane = tl.arange(0, BLOCK)
    nothing = tl.full((BLOCK,), float("-inf"), tl.float32)
    weight = weigh(nothing, lane < 0, row_max, SUM_EXP)
    first, second, third, fourth, lost = nothing, nothing, nothing, nothing, nothing
    for start in tl.range(0, length, BLOCK, loop_unroll_factor=2):
        x = tl.load(x_ptr + start + lane, mask=start + lane < length, other=float("-inf"))
        weight += weigh(x, (x >= pivot) & (x < upper), row_max, SUM_EXP)
        inside = (x > low) & (x < high)
        lost = tl.where(inside, tl.maximum(lost, fourth), lost)
        fourth = tl.where(inside, third, fourth)
        third = tl.where(inside, second, third)
        second = tl.where(inside, first, second)
        first = tl.where(inside, x, first)
    kept = tl.join(tl.join(first, second), tl.join(third, fourth)).reshape(4 * BLOCK, can_reorder=True)
    return tl.sum(weight, 0), kept, (tl.max(lost, 0) > float("-inf")).to(tl.int32)


@triton.jit
def weigh(x, counted, row_max, SUM_EXP: tl.constexpr):
    """Return the weight of each counted logit, else 0: int64 with SUM_EXP, else int32."""
    return weight_of(tl.where(counted, tl.exp(x - row_max), 0.0)) if SUM_EXP else counted.to(tl.int32)


@triton.jit
def weight_of(sum_exp):
    """Return a sum of exponentials, relative to the row's largest logit, as a weight."""
    return (sum_exp * _UNITS).to(tl.int64)


@triton.jit
def share_of(p, weight):
    """Return the share p of a weight."""
    return (p.to(tl.float64) * weight.to(tl.float64)).to(tl.int64)


@triton.jit
def as_rank(x):
    """Map a float to an int32 with the same order; both zeros map to the larger rank."""
    ALL_BUT_SIGN: tl.constexpr = 0x7FFFFFFF
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & ALL_BUT_SIGN)


@triton.jit
def as_float(rank):
    """Return the float of a rank."""
    ALL_BUT_SIGN: tl.constexpr = 0x7FFFFFFF
    return (rank ^ ((rank >> 31) & ALL_BUT_SIGN)).to(tl.float32, bitcast=True)


@triton.jit
def middle(low, high):
    """Return the midpoint, rounded down, without overflow: low if nothing lies between."""
    return (low & high) + ((low ^ high) >> 1)
