"""The Triton kernels of restrict_logits; restrict_logits.py holds its contract, and describes what they share.

Two thresholds are searched for, top_k's by counting and top_p's by mass, where a logit x weighs exp(x - the row's
largest). A bin holds the logits from its edge to the next bin's. What a bin's members are is decided by comparing
logits with edges that were stored once: computed again, they could be rounded in another way.
"""

from __future__ import annotations

from builders.kernels.triton_runtime import await_previous, tl, triton
from spec_decode.sampling.kernels.threshold_search import search, walk

_MASK = tl.constexpr(-1e9)
_LEAST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def extent_kernel(logits, top_k, top_p, least, largest, vocab, group, PART: tl.constexpr, PDL: tl.constexpr):
    """The least logit of a part that is no mask, else inf, and its largest one, else -inf."""
    await_previous(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, _, few, share = _restriction(top_k, top_p, row, group, vocab)
    if few | share:
        x = _load(logits, row, part * PART + tl.arange(0, PART), vocab)
        at = row * tl.num_programs(1) + part
        # A mask that is no -inf is never worth a bin: the lowest one takes it in.
        tl.store(least + at, tl.min(tl.where(x > _MASK, x, float("inf")), 0))
        tl.store(largest + at, tl.max(tl.where(x > float("-inf"), x, float("-inf")), 0))


@triton.jit
def weigh_kernel(
    logits,
    top_k,
    top_p,
    least,
    largest,
    edges,
    peaks,
    counts,
    masses,
    vocab,
    group,
    PART: tl.constexpr,
    LANES: tl.constexpr,
    BINS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """How many logits of a part are not below each edge, and for top_p their mass."""
    await_previous(PDL)
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    _, p, few, share = _restriction(top_k, top_p, row, group, vocab)
    if few | share:
        every = tl.arange(0, PARTS)
        peak = tl.max(tl.load(largest + row * parts + every, mask=every < parts, other=float("-inf")), 0)
        low = tl.min(tl.load(least + row * parts + every, mask=every < parts, other=float("inf")), 0)
        if share & (not few):
            # All that lies lower weighs less than 1 - p of the largest logit alone.
            low = tl.maximum(low, peak - tl.log(vocab / (1.0 - p)))
        low = tl.minimum(low, peak)
        bin = tl.arange(0, BINS)
        edge = tl.where(bin > 0, low + (peak - low) * (bin * (1.0 / BINS)), _LEAST)
        if part == 0:
            tl.store(edges + row * BINS + bin, edge)
            tl.store(peaks + row, peak)
        at = (row * BINS + bin) * parts + part
        if share:
            count, mass = _weigh_part(logits, row, part, vocab, edge, peak, True, PART, LANES, BINS)
            tl.store(masses + at, mass)
        else:
            count, mass = _weigh_part(logits, row, part, vocab, edge, peak, False, PART, LANES, BINS)
        tl.store(counts + at, count)


@triton.jit
def _weigh_part(
    logits,
    row,
    part,
    vocab,
    edge,
    peak,
    SHARES: tl.constexpr,
    PART: tl.constexpr,
    LANES: tl.constexpr,
    BINS: tl.constexpr,
):
    """Every thread weighs its own logits against all edges: no sum crosses threads before the end."""
    count = tl.zeros((BINS, LANES), tl.float32)
    mass = tl.zeros((BINS, LANES), tl.float32)
    for start in tl.range(part * PART, tl.minimum((part + 1) * PART, vocab), LANES, loop_unroll_factor=4):
        x = _load(logits, row, start + tl.arange(0, LANES), vocab)
        # Factors, not conditions: 32 of those would not find room in a thread's predicates.
        reached = (x[None, :] >= edge[:, None]).to(tl.float32)
        count += reached
        if SHARES:
            mass += reached * tl.exp(x - peak)[None, :]
    return tl.sum(count, 1).to(tl.int32), tl.sum(mass, 1)


@triton.jit
def gather_kernel(
    logits,
    top_k,
    top_p,
    edges,
    counts,
    bins,
    members,
    vocab,
    group,
    SHARES: tl.constexpr,
    PART: tl.constexpr,
    BINS: tl.constexpr,
    PARTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    PDL: tl.constexpr,
):
    """The members of the bin that holds a threshold, in the order of their tokens, as many as there is room for.

    With SHARES the bin was chosen for top_p; else the k-th largest logit's is chosen here.
    """
    await_previous(PDL)
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    k, _, few, share = _restriction(top_k, top_p, row, group, vocab)
    wanted = share if SHARES else few
    if wanted:
        if SHARES:
            bin = tl.load(bins + row)
        else:
            bin = _last_that_holds(_totals(counts, row, parts, BINS, PARTS), k)
            if part == 0:
                tl.store(bins + row, bin)
        held = _held(counts, row, bin, part, parts, BINS)
        if held > 0:
            lower, upper = _bounds(edges, row, bin, BINS)
            every = tl.arange(0, PARTS)
            before = tl.sum(tl.where(every < part, _held(counts, row, bin, every, parts, BINS), 0), 0)
            x = _load(logits, row, part * PART + tl.arange(0, PART), vocab)
            inside = (x >= lower) & (x < upper)
            place = before + tl.cumsum(inside.to(tl.int32), 0) - 1
            tl.store(members + row * CAPACITY + place, x, mask=inside & (place < CAPACITY))


@triton.jit
def rank_kernel(
    logits,
    top_k,
    top_p,
    edges,
    peaks,
    counts,
    masses,
    bins,
    members,
    thresholds,
    targets,
    vocab,
    group,
    parts,
    BINS: tl.constexpr,
    PARTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """top_k's threshold; and for top_p the bin of its own, and the mass that this bin has to add to those above it."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    k, p, few, share = _restriction(top_k, top_p, row, group, vocab)
    if few | share:
        peak = tl.load(peaks + row)
        mass = tl.zeros((BINS,), tl.float32)
        if share:
            mass = _totals(masses, row, parts, BINS, PARTS)
        threshold = float("-inf")
        stays = _at(mass, 0)
        bin = 0
        if few:
            bin = tl.load(bins + row)
            lower, upper = _bounds(edges, row, bin, BINS)
            count = _totals(counts, row, parts, BINS, PARTS)
            above = _at(count, bin + 1)
            x, length = _members(logits, row, vocab, members, _at(count, bin) - above, CAPACITY)
            threshold = search(x, length, lower, upper, (k - above).to(tl.float32), peak, False, BLOCK)
            if share:
                stays, _, _ = walk(x, length, threshold, threshold, upper, upper, peak, True, BLOCK)
                stays += _at(mass, bin + 1)
        tl.store(thresholds + row, threshold)
        if share:
            target = p * stays
            bin = _last_that_holds(mass, target)
            tl.store(bins + row, bin)
            tl.store(targets + row, target - _at(mass, bin + 1))


@triton.jit
def share_kernel(
    logits,
    top_k,
    top_p,
    edges,
    peaks,
    counts,
    bins,
    members,
    thresholds,
    targets,
    vocab,
    group,
    parts,
    BINS: tl.constexpr,
    PARTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """top_p's threshold, which is not below top_k's."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    _, _, _, share = _restriction(top_k, top_p, row, group, vocab)
    if share:
        bin = tl.load(bins + row)
        lower, upper = _bounds(edges, row, bin, BINS)
        # Also if rounding made of the sums that more should stay than top_k left: then the search ends where it starts.
        lower = tl.maximum(lower, tl.load(thresholds + row))
        count = _totals(counts, row, parts, BINS, PARTS)
        x, length = _members(logits, row, vocab, members, _at(count, bin) - _at(count, bin + 1), CAPACITY)
        target, peak = tl.load(targets + row), tl.load(peaks + row)
        tl.store(thresholds + row, search(x, length, lower, upper, target, peak, True, BLOCK))


@triton.jit
def cut_kernel(logits, top_k, top_p, thresholds, vocab, group, PART: tl.constexpr, PDL: tl.constexpr):
    """-inf for a part's logits below the row's threshold."""
    await_previous(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, _, few, share = _restriction(top_k, top_p, row, group, vocab)
    if few | share:
        token = part * PART + tl.arange(0, PART)
        x = _load(logits, row, token, vocab)
        below = (token < vocab) & (x < tl.load(thresholds + row))
        tl.store(logits + row * vocab + token, float("-inf"), mask=below)


@triton.jit
def _restriction(top_k, top_p, row, group, vocab):
    """A row's k and p, and whether each of them is on."""
    k = tl.load(top_k + row // group)
    p = tl.load(top_p + row // group)
    return k, p, (k > 0) & (k < vocab), p < 1


@triton.jit
def _load(logits, row, token, vocab):
    """A row's logits at tokens, -inf behind its end."""
    return tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf"))


@triton.jit
def _totals(weights, row, parts, BINS: tl.constexpr, PARTS: tl.constexpr):
    """What a row has from each edge on, [BINS], of its parts' counts or masses."""
    bin = tl.arange(0, BINS)[:, None]
    part = tl.arange(0, PARTS)[None, :]
    return tl.sum(tl.load(weights + (row * BINS + bin) * parts + part, mask=part < parts, other=0), 1)


@triton.jit
def _held(counts, row, bin, part, parts, BINS: tl.constexpr):
    """How many members of a bin a part has."""
    at = counts + (row * BINS + bin) * parts + part
    reached = tl.load(at, mask=part < parts, other=0)
    return reached - tl.load(at + parts, mask=(part < parts) & (bin + 1 < BINS), other=0)


@triton.jit
def _at(totals, bin):
    """The total from a bin's edge on; of the one behind the last, 0."""
    return tl.sum(tl.where(tl.arange(0, totals.shape[0]) == bin, totals, 0), 0)


@triton.jit
def _last_that_holds(totals, target):
    """The last bin from whose edge on a row has `target`, or the first if none has."""
    return tl.maximum(tl.sum((totals >= target).to(tl.int32), 0) - 1, 0)


@triton.jit
def _bounds(edges, row, bin, BINS: tl.constexpr):
    """The least that a bin takes in, and the least that it does not."""
    edge = edges + row * BINS + bin
    return tl.load(edge), tl.load(edge + 1, mask=bin + 1 < BINS, other=float("inf"))


@triton.jit
def _members(logits, row, vocab, members, number, CAPACITY: tl.constexpr):
    """Where to find a bin's members, and how many logits to look at: the row itself where there are too many."""
    x = members + row * CAPACITY
    if number > CAPACITY:
        x = logits + row * vocab
    return x, tl.where(number > CAPACITY, vocab, number)
