"""The Triton kernels of streamed_linear; streamed_linear.py holds its contract.

The weight is the tall side of the tensor core's product and the rows its narrow one, so that few rows leave little of
it empty. A program owns a tile of outputs and, where K is split, a share of K, whose partial sums a second kernel adds
in order: a result has one order of summation whatever the device does. Legend: T rows, N outputs, K inputs of a row.
"""

from __future__ import annotations

from builders.kernels.triton_runtime import await_previous, tl, triton


@triton.jit
def streamed_kernel(
    x,  # [T, K]; with tokens of any number of rows
    weight,  # [N, K], with a gate [2 N, K]; with ends [E, N, K] or [E, 2 N, K]
    ends,  # int32 [E], one past each group's last row, or None
    tokens,  # int64 [T], the row of x for each sorted row, or None
    bias,  # [N], or None
    residual,  # [T, N], or None
    out,  # out: [T, N]; SPLIT: fp32 [shares, T, N]
    rows,  # T
    x_stride,  # of a row
    share,  # inputs of a program, a multiple of BLOCK_K
    limit,  # of gate and up, or None
    N: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,  # E; 0 without ends
    GATED: tl.constexpr,
    SPLIT: tl.constexpr,  # store a share's sums as they are, for sum_shares_kernel
    EVICTION: tl.constexpr,  # the eviction policy of the weight's loads
    BLOCK_T: tl.constexpr,  # rows of the first tile
    BLOCK_MORE: tl.constexpr,  # rows of the second tile, or 0
    BLOCK_N: tl.constexpr,  # rows of the weight in a tile; with a gate half of them are the up projection's
    BLOCK_K: tl.constexpr,  # inputs multiplied at a time
    BLOCK_E: tl.constexpr,  # E, rounded up to a power of two
    STAGES: tl.constexpr,  # tiles in flight
    FP32_DOT: tl.constexpr,  # multiply in fp32, for the interpreter
    PDL: tl.constexpr,
):
    """One tile of outputs over one share of K, for all rows, or with `ends` for those of one group.

    Its grid is [tiles of outputs, shares, 1], with `ends` [tiles of outputs, shares, T]. A tile of the weight is loaded
    once and multiplied with BLOCK_T rows and BLOCK_MORE rows after them: a tile's sizes are powers of two, and 80 rows
    make 64 and 16.
    """
    # The outputs and the share of this program. With a gate the upper half of a tile is of the gate, the lower one of
    # the up projection, and both are of the same outputs.
    HEIGHT: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    index = tl.arange(0, BLOCK_N)
    within = tl.program_id(0) * HEIGHT + index % HEIGHT
    output = within + index // HEIGHT * N
    owned = within < N
    begin = tl.program_id(1) * share
    if ends is None:
        ask_for_weight(weight, output, begin, N * (2 if GATED else 1), K, BLOCK_K, PDL)
    await_previous(PDL)

    # The rows of this program, in one tile or two, and where their inputs start
    row = tl.arange(0, BLOCK_T)
    last = rows
    if ends is not None:
        row, last, group = _rows_of_group(ends, row, rows, GROUPS, BLOCK_T, BLOCK_E)
        weight += group.to(tl.int64) * (N * (2 if GATED else 1)) * K
    source = row if tokens is None else tl.load(tokens + row, mask=row < last, other=0)
    of_weight = weight + output.to(tl.int64)[:, None] * K
    of_x = x + source.to(tl.int64)[None, :] * x_stride
    # A program without rows reads nothing.
    end = tl.where(tl.min(row, 0) < last, tl.minimum(begin + share, K), begin)
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    if BLOCK_MORE:
        more_row = BLOCK_T + tl.arange(0, BLOCK_MORE)
        of_more = x + more_row.to(tl.int64)[None, :] * x_stride
        more_acc = tl.zeros((BLOCK_N, BLOCK_MORE), tl.float32)

    # The products, BLOCK_K inputs at a time
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK_K)
        if K % BLOCK_K == 0:
            a = tl.load(of_weight + column[None, :], mask=owned[:, None], other=0.0, eviction_policy=EVICTION)
        else:
            a = tl.load(
                of_weight + column[None, :],
                mask=owned[:, None] & (column < K)[None, :],
                other=0.0,
                eviction_policy=EVICTION,
            )
        if FP32_DOT:
            a = a.to(tl.float32)
        acc = tl.dot(a, _inputs(of_x, row, last, column, K, BLOCK_K, FP32_DOT), acc, input_precision="ieee")
        if BLOCK_MORE:
            more = _inputs(of_more, more_row, last, column, K, BLOCK_K, FP32_DOT)
            more_acc = tl.dot(a, more, more_acc, input_precision="ieee")

    # What comes after the product, and the store
    _store(acc, row, last, bias, residual, out, rows, limit, output, owned, N, GATED, SPLIT, BLOCK_T, HEIGHT)
    if BLOCK_MORE:
        _store(
            more_acc,
            more_row,
            last,
            bias,
            residual,
            out,
            rows,
            limit,
            output,
            owned,
            N,
            GATED,
            SPLIT,
            BLOCK_MORE,
            HEIGHT,
        )


@triton.jit
def sum_shares_kernel(
    partial,  # fp32 [shares, T, N], with a gate [shares, T, 2 N]
    bias,  # [N], or None
    residual,  # [T, N], or None
    out,  # out: [T, N]
    rows,  # T
    limit,  # of gate and up, or None
    N: tl.constexpr,
    GATED: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,  # outputs of a program
    PDL: tl.constexpr,
):
    """The sums of all shares, and what comes after the product; a program takes a block of a row's outputs."""
    await_previous(PDL)
    width: tl.constexpr = N * (2 if GATED else 1)
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = output < N
    result = tl.zeros((BLOCK,), tl.float32)
    up = tl.zeros((BLOCK,), tl.float32)
    # Unrolled, so that all loads are on their way before the first sum waits for one.
    for share in tl.static_range(SHARES):
        summed = partial + (share * rows + row) * width + output
        result += tl.load(summed, mask=inside, other=0.0)
        if GATED:
            up += tl.load(summed + N, mask=inside, other=0.0)
    finish(result, up, bias, residual, out, row, output, inside, limit, N, GATED)


@triton.jit
def ask_for_weight(
    weight,  # [height, K]
    row,  # of the weight, any number; what lies outside of it is cut to its last row
    begin,
    height,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Bring a program's first tile of the weight, BLOCK_K inputs from `begin` on, into the L2 cache.

    It may run before await_previous: it reads no value, and memory is idle while a program waits.
    """
    if PDL:
        LINE: tl.constexpr = 128 // (weight.dtype.element_ty.primitive_bitwidth // 8)
        LINES: tl.constexpr = BLOCK_K // LINE if BLOCK_K > LINE else 1
        column = tl.minimum(begin + tl.arange(0, LINES) * LINE, K - 1)
        line = weight + tl.minimum(row, height - 1).to(tl.int64)[:, None] * K + column[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line.to(tl.int64)], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _inputs(
    of_x,  # where each row's inputs start, [1, rows]
    row,  # [rows]
    last,
    column,  # [BLOCK_K]
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FP32_DOT: tl.constexpr,
):
    """A tile of rows' inputs, [BLOCK_K, rows]."""
    if K % BLOCK_K == 0:
        b = tl.load(of_x + column[:, None], mask=(row < last)[None, :], other=0.0)
    else:
        b = tl.load(of_x + column[:, None], mask=(row < last)[None, :] & (column < K)[:, None], other=0.0)
    if FP32_DOT:
        b = b.to(tl.float32)
    return b


@triton.jit
def _store(
    acc,  # fp32 [BLOCK_N, BLOCK_T]
    row,  # [BLOCK_T]
    last,  # one past the last row that is stored
    bias,  # [N], or None
    residual,  # [T, N], or None
    out,  # out: [T, N]; SPLIT: fp32 [shares, T, N]
    rows,  # T
    limit,  # of gate and up, or None
    output,  # [BLOCK_N]
    owned,  # bool [BLOCK_N], whether an output is one of the N
    N: tl.constexpr,
    GATED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HEIGHT: tl.constexpr,  # outputs of a program
):
    """A tile's sums, [outputs, rows]: the share's as they are, or all with what comes after."""
    result = tl.trans(acc)
    if SPLIT:
        to = out + (tl.program_id(1) * rows + row).to(tl.int64)[:, None] * N + output[None, :]
        tl.store(to, result, mask=(row < last)[:, None] & owned[None, :])
    else:
        up = result
        if GATED:
            halves = tl.permute(tl.reshape(result, (BLOCK_T, 2, HEIGHT)), (0, 2, 1))
            result, up = tl.split(halves)
        output = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)[None, :]
        inside = (row < last)[:, None] & (output < N)
        finish(result, up, bias, residual, out, row.to(tl.int64)[:, None], output, inside, limit, N, GATED)


@triton.jit
def _rows_of_group(
    ends,  # int32 [E]
    row,  # [BLOCK_T], counted from the first of this program
    rows,  # T
    GROUPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """The sorted rows of this program, one past their group's last, and the group.

    There is a program for every sorted row. Of a group's rows every BLOCK_T-th has a tile, and the programs of the
    others have no rows: so many programs do for any groups, without knowing on the host how many there are.
    """
    at = tl.program_id(2)
    index = tl.arange(0, BLOCK_E)
    # The last group has no end, so that every row belongs to one.
    end = tl.load(ends + index, mask=index < GROUPS - 1, other=2147483647)  # the largest int32
    before = end <= at
    group = tl.sum(before.to(tl.int32), 0)
    first = tl.max(tl.where(before, end, 0), 0)
    last = tl.minimum(tl.min(tl.where(before, 2147483647, end), 0), rows)
    return tl.where((at - first) % BLOCK_T == 0, at + row, rows), last, group


@triton.jit
def finish(
    result,  # fp32, of shape `inside`; with a gate the gate's
    up,  # with a gate the same of the up projection
    bias,  # [N], or None
    residual,  # [T, N], or None
    out,  # out: [T, N]
    row,  # int64, broadcasts to `inside`
    output,  # broadcasts to `inside`
    inside,  # bool
    limit,  # of gate and up, or None
    N: tl.constexpr,
    GATED: tl.constexpr,
):
    """Gate, add and store."""
    if bias is not None:
        result += tl.load(bias + output, mask=output < N, other=0.0).to(tl.float32)
    if GATED:
        if limit is not None:
            # Comparisons and not minima, which would make a number of NaN.
            result = tl.where(result > limit, limit, result)
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        result = result / (1.0 + tl.exp(-result)) * up
    if residual is not None:
        result += tl.load(residual + row * N + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + output, result.to(out.dtype.element_ty), mask=inside)
