"""Kernels of rejection sampling over a tree: each query token's children, then the draw after the last accepted one."""

from __future__ import annotations

from builders.kernels.triton_runtime import await_previous, tl, triton
from spec_decode.sampling.kernels.vocab_blocks import merge_sum_exp
from spec_decode.sampling.noise import ACCEPT, TARGET, triton_gumbel, triton_key, triton_uniform
from spec_decode.trees.kernels.ancestor_masks import read_parents
from spec_decode.trees.kernels.follow_tree import walk_tree

_ACCEPT, _TARGET = tl.constexpr(ACCEPT), tl.constexpr(TARGET)


@triton.jit
def _left(p, q, token, tried, p_scales, q_scales, count, CHILDREN: tl.constexpr):
    """What the first `count` children leave of p and of q, not normalised; of `token`, with the scalars of each child
    fp32 and int32 [CHILDREN]."""
    rank = tl.arange(0, CHILDREN)
    for child in range(0, count):
        p_scale = tl.sum(tl.where(rank == child, p_scales, 0.0), 0)
        q_scale = tl.sum(tl.where(rank == child, q_scales, 0.0), 0)
        p = tl.maximum(p * p_scale - q * q_scale, 0.0)
        q = tl.where(token == tl.sum(tl.where(rank == child, tried, 0), 0), 0.0, q)
    return p, q


@triton.jit
def _add_to_norm(x, largest, sum_exp):
    """Largest logit and sum of exp(logit - largest) of each lane, with one more of each."""
    most = tl.maximum(largest, x)
    grown = tl.where(x == float("-inf"), 0.0, tl.exp(x - most))
    return most, tl.where(sum_exp > 0, sum_exp * tl.exp(largest - most), 0.0) + grown


@triton.jit
def _probability(logits, token, inside, largest, sum_exp):
    x = tl.load(logits + token, mask=inside, other=float("-inf"))
    return tl.where(inside, tl.div_rn(tl.exp(x - largest), sum_exp), 0.0)


@triton.jit
def _argmax(logits, vocab, BLOCK: tl.constexpr):
    """The first of the largest logits."""
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    at = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
        at = tl.where(x > largest, token, at)
        largest = tl.maximum(largest, x)
    return tl.min(tl.where(largest == tl.max(largest, 0), at, 2147483647), 0)


@triton.jit
def _norms(p_logits, q_logits, q_stride, vocab, BLOCK: tl.constexpr):
    """Largest logit and sum of exp(logit - largest) of p, and of q."""
    p_most = tl.full((BLOCK,), float("-inf"), tl.float32)
    q_most = tl.full((BLOCK,), float("-inf"), tl.float32)
    p_sum = tl.zeros((BLOCK,), tl.float32)
    q_sum = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocab
        p_most, p_sum = _add_to_norm(tl.load(p_logits + token, mask=inside, other=float("-inf")), p_most, p_sum)
        y = tl.load(q_logits + token.to(tl.int64) * q_stride, mask=inside, other=float("-inf"))
        q_most, q_sum = _add_to_norm(y, q_most, q_sum)
    p_most, p_sum = merge_sum_exp(p_most, p_sum)
    q_most, q_sum = merge_sum_exp(q_most, q_sum)
    return p_most, p_sum, q_most, q_sum


@triton.jit
def try_children_kernel(
    processed, draft_tokens, parents, draft_logits, draft_columns, temperature, seeds, draft_positions,
    passes, norms, scales, tried, tokens, vocab, draft_row_stride, draft_column_stride, draft_token_stride,
    BLOCK: tl.constexpr, NODES: tl.constexpr, CHILDREN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of a query token: which of its children passes, were it reached, and what they leave of p if none does."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1)
    line = row * tokens + at
    lines = tl.num_programs(0) * tokens
    node = tl.arange(0, NODES)
    parent = read_parents(parents, row, tokens, NODES)
    is_child = parent == at
    count = tl.sum(is_child.to(tl.int32), 0)
    if count > 0:
        drafted = tl.load(draft_tokens + row * (tokens - 1) + node - 1, mask=is_child, other=-1)
        p_logits = processed + line * vocab
        accepted = tl.full((), NODES, tl.int32)
        if tl.load(temperature + row) > 0:
            q_logits = draft_logits + row * draft_row_stride + tl.load(draft_columns + line) * draft_column_stride
            p_most, p_sum, q_most, q_sum = _norms(p_logits, q_logits, draft_token_stride, vocab, BLOCK)
            tl.store(norms + line, p_most)
            tl.store(norms + lines + line, p_sum)
            tl.store(norms + 2 * lines + line, q_most)
            tl.store(norms + 3 * lines + line, q_sum)
            depth = 0
            above = at
            while above > 0:
                above = tl.sum(tl.where(node == above, parent, 0), 0).to(tl.int32)
                depth += 1
            key = triton_key(tl.load(seeds + row), tl.load(draft_positions + row) + depth, _ACCEPT)
            rank = tl.arange(0, CHILDREN)
            p_scales = tl.full((CHILDREN,), 1.0, tl.float32)
            q_scales = tl.zeros((CHILDREN,), tl.float32)
            removed = tl.full((CHILDREN,), -1, tl.int32)
            p_left = 1.0
            q_left = 1.0
            ranks = tl.cumsum(is_child.to(tl.int32), 0)
            child = 0
            while (child < count) & (accepted == NODES):
                is_next = is_child & (ranks == child + 1)
                token = tl.sum(tl.where(is_next, drafted, 0), 0)
                known = (token >= 0) & (token < vocab)
                p = _probability(p_logits, token, known, p_most, p_sum)
                q = _probability(q_logits, token * draft_token_stride, known, q_most, q_sum)
                p, q = _left(p, q, token, removed, p_scales, q_scales, child, CHILDREN)
                p_scale = tl.div_rn(1.0, p_left)
                q_scale = tl.div_rn(1.0, q_left)
                if (triton_uniform(key, key * 0 + child) * (q * q_scale) < p * p_scale) & (q > 0):
                    accepted = tl.sum(tl.where(is_next, node, 0), 0)
                else:
                    p_sums = tl.zeros((BLOCK,), tl.float32)
                    q_sums = tl.zeros((BLOCK,), tl.float32)
                    for start in range(0, vocab, BLOCK):
                        each = start + tl.arange(0, BLOCK)
                        inside = each < vocab
                        of_p = _probability(p_logits, each, inside, p_most, p_sum)
                        of_q = _probability(q_logits, each.to(tl.int64) * draft_token_stride, inside, q_most, q_sum)
                        of_p, of_q = _left(of_p, of_q, each, removed, p_scales, q_scales, child, CHILDREN)
                        p_sums += tl.maximum(of_p * p_scale - of_q * q_scale, 0.0)
                        q_sums += tl.where(each == token, 0.0, of_q)
                    rest = tl.sum(p_sums, 0)
                    # Rounding can empty a rest that is zero in theory only if p == q: then p itself is right.
                    if (q > 0) & (rest > 0):
                        p_scales = tl.where(rank == child, p_scale, p_scales)
                        q_scales = tl.where(rank == child, q_scale, q_scales)
                        removed = tl.where(rank == child, token.to(tl.int32), removed)
                        p_left = rest
                        q_left = tl.sum(q_sums, 0)
                        q_left = tl.where(q_left > 0, q_left, 1.0)
                child += 1
            tl.store(scales + line * CHILDREN + rank, p_scales)
            tl.store(scales + (lines + line) * CHILDREN + rank, q_scales)
            tl.store(tried + line * CHILDREN + rank, removed)
        else:
            accepted = tl.min(tl.where(is_child & (drafted == _argmax(p_logits, vocab, BLOCK)), node, NODES), 0)
        tl.store(passes + row * tokens + node, (node == accepted).to(tl.int32), mask=is_child)


@triton.jit
def draw_left_kernel(
    processed, parents, draft_logits, draft_columns, temperature, seeds, draft_positions, passes, norms, scales, tried,
    best, best_token, accepted, path, tokens, vocab, max_depth,
    draft_row_stride, draft_column_stride, draft_token_stride,
    BLOCK: tl.constexpr, NODES: tl.constexpr, CHILDREN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The accepted path of a row, and the best token of a block of the vocabulary after it."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    lines = tl.num_programs(0) * tokens
    node = tl.arange(0, NODES)
    parent = read_parents(parents, row, tokens, NODES)
    passing = tl.load(passes + row * tokens + node, mask=parent >= 0, other=0) > 0
    count, last = walk_tree(parent, passing, path + row * max_depth, max_depth, block == 0, NODES)
    if block == 0:
        tl.store(accepted + row, count.to(tl.int64))
    line = row * tokens + last
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    score = tl.load(processed + line * vocab + token, mask=inside, other=float("-inf"))
    if tl.load(temperature + row) > 0:
        gumbel = triton_gumbel(triton_key(tl.load(seeds + row), tl.load(draft_positions + row) + count, _TARGET), token)
        children = tl.sum((parent == last).to(tl.int32), 0)
        rank = tl.arange(0, CHILDREN)
        removed = tl.load(tried + line * CHILDREN + rank, mask=rank < children, other=-1)
        if tl.max(removed, 0) >= 0:
            p_scales = tl.load(scales + line * CHILDREN + rank, mask=rank < children, other=1.0)
            q_scales = tl.load(scales + (lines + line) * CHILDREN + rank, mask=rank < children, other=0.0)
            p_logits = processed + line * vocab
            q_logits = draft_logits + row * draft_row_stride + tl.load(draft_columns + line) * draft_column_stride
            p = _probability(p_logits, token, inside, tl.load(norms + line), tl.load(norms + lines + line))
            q = _probability(
                q_logits, token.to(tl.int64) * draft_token_stride, inside,
                tl.load(norms + 2 * lines + line), tl.load(norms + 3 * lines + line),
            )  # fmt: skip
            p, _ = _left(p, q, token, removed, p_scales, q_scales, children, CHILDREN)
            score = tl.log(p)
        score = score + gumbel
    largest, first = tl.max(score, 0, return_indices=True)
    part = row * tl.num_programs(1) + block
    tl.store(best + part, largest)
    tl.store(best_token + part, block * BLOCK + first)
