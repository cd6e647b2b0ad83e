"""Linear layers over too many rows for skinny_linear and too few to keep a tensor core busy: bound by reading the
weight, which goes through once.

The weight is the tall side of the tensor core's product and the rows its narrow one, so that few rows leave little of
it empty. A program owns a tile of outputs and, where K is split, a share of K, whose partial sums a second kernel adds
in order: a result has one order of summation whatever the device does.

Legend: T rows, K inputs, N outputs, E weights. All work of a row happens in fp32 between the loads and the store.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from builders.errors import BatchError, require
from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.models.kernels.stored_as import stored_as
from spec_decode.models.kernels.streamed_tiling import (
    MAX_ROWS,
    StreamedTiling,
    power_of_two,
    room_of,
    streamed_tiling,
)
from spec_decode.models.kernels.streamed_tma_kernel import (
    ask_for_weight,
    describe,
    finish,
    is_describable,
    streamed_tma_kernel,
)

_KEPT_IN_CACHE = 32 << 20
"""Bytes of weights above which no L2 cache would hold them until the next step: they are read to be dropped first."""

_SUM_BLOCK = 512


def num_shares(x: torch.Tensor, weight: torch.Tensor) -> int:
    """How many shares K is cut into for rows x [T, K] and weight [N, K]: more than 1 where N alone gives too few
    programs."""
    return StreamedLinear(x, weight).cut().shares


def streamed_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    gated: bool = False,
    limit: float | None = None,
) -> torch.Tensor:
    """x @ weight^T, plus bias [N] and residual [T, N] where there are such; [T, N].

    x [T, K], adjacent along K; weight [N, K], contiguous, of one dtype. gated: weight [2 N, K] holds gate above up, and
    the result is silu(gate) * up, with a limit silu(min(gate, limit)) * clamp(up, -limit, limit), and there is no bias.
    Raises BatchError for more than MAX_ROWS rows and for shapes or dtypes that do not fit, with nothing run.
    """
    require(
        0 < x.shape[0] <= MAX_ROWS,
        f"a streamed linear takes 1 to {MAX_ROWS} rows, got {x.shape[0]}. Ask product_kind, and use "
        "torch's linear where it says so.",
    )
    return _streamed_linear(
        *StreamedLinear(x, weight, bias=bias, residual=residual, gated=gated, limit=limit).checked()
    )


def streamed_groups(
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    tokens: torch.Tensor | None = None,
    *,
    gated: bool = False,
    limit: float | None = None,
) -> torch.Tensor:
    """Rows sorted by group, each times its group's weight; [R, N].

    x       float [R, K], or [T, K] with tokens
    weight  as x, [E, N, K], contiguous; gated: [E, 2 N, K], gate above up, and a row becomes silu(gate) * up
    ends    int32 [E]: one past each group's last row; rows from ends[-1] on are of the last group
    tokens  int64 [R], in 0..T-1: the row of x that each of the R rows is; None: they are x
    limit   with it, silu(min(gate, limit)) * clamp(up, -limit, limit)

    The weights of groups that have rows are read, once for every 16 of their rows. Raises BatchError for shapes or
    dtypes that do not fit, with nothing run.
    """
    return _streamed_linear(*StreamedLinear(x, weight, ends, tokens, gated=gated, limit=limit).checked())


class Cut(NamedTuple):
    """How a product is cut. share: inputs of each of so many shares of a row's, of which the last may have fewer."""

    tile: StreamedTiling
    share: int
    shares: int


class StreamedLinear(NamedTuple):
    """Rows x, the weight or the weights of groups, and what comes after; None for what a form does without.

    As `streamed_linear` and `streamed_groups` have them; returns the result [T, N] in the weight's dtype.
    """

    x: torch.Tensor
    weight: torch.Tensor
    ends: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    gated: bool = False
    limit: float | None = None

    @property
    def outputs(self) -> int:
        """N."""
        return self.weight.shape[-2] // 2 if self.gated else self.weight.shape[-2]

    @property
    def rows(self) -> int:
        """T, or R of groups."""
        return self.x.shape[0] if self.tokens is None else self.tokens.shape[0]

    def checked(self) -> StreamedLinear:
        """These. Raises BatchError for shapes or dtypes that do not fit."""
        x, weight, ends, tokens, bias, residual = self[:6]
        kind = (weight.dtype, x.device)
        if not (
            x.dim() == 2
            and weight.dim() == (2 if ends is None else 3)
            and weight.shape[-1] == x.shape[1]
            and weight.is_contiguous()
            and x.stride(1) == 1
            and (x.dtype, weight.device) == kind
            and not (self.gated and (bias is not None or weight.shape[-2] % 2))
            and (ends is None or (ends.shape == weight.shape[:1] and ends.dtype == torch.int32))
            and (tokens is None or (ends is not None and tokens.dim() == 1 and tokens.dtype == torch.int64))
            and (bias is None or (bias.shape == (self.outputs,) and bias.is_contiguous()))
            and (residual is None or (residual.shape == (self.rows, self.outputs) and residual.is_contiguous()))
            and all(each is None or (each.dtype, each.device) == kind for each in (bias, residual))
            and all(each is None or (each.is_contiguous() and each.device == x.device) for each in (ends, tokens))
        ):
            tensors = {name: value for name, value in self._asdict().items() if isinstance(value, torch.Tensor)}
            found = ", ".join(f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors.items())
            raise BatchError(
                "a streamed linear needs contiguous tensors of one dtype and device whose sizes fit, got "
                f"{found}. See its docstring for the shapes."
            )
        return self

    def reference(self) -> torch.Tensor:
        x = (self.x if self.tokens is None else self.x[self.tokens]).float()
        if self.ends is None:
            out = F.linear(x, self.weight.float(), None if self.bias is None else self.bias.float())
        else:
            rows = torch.arange(self.rows, dtype=torch.int32, device=x.device)
            groups = torch.searchsorted(self.ends[:-1], rows, right=True)
            # Every row alone: torch's own sums depend on how many there are.
            out = x.new_empty(self.rows, self.weight.shape[1])
            for t in range(self.rows):
                weight = self.weight.index_select(0, groups[t : t + 1])[0]
                out[t] = F.linear(x[t : t + 1], weight.float())[0]
        if self.gated:
            gate, up = out.chunk(2, -1)
            if self.limit is not None:
                gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
            out = F.silu(gate) * up
        if self.residual is not None:
            out = self.residual.float() + out
        return out.to(self.weight.dtype)

    def fake(self) -> torch.Tensor:
        return self.weight.new_empty(self.rows, self.outputs)

    def launch(self, tile: StreamedTiling | None = None) -> torch.Tensor:
        """tile: how the kernel is cut; None: as `streamed_tiling` does."""
        out, cut = self.fake(), self.cut(tile)
        if not self.rows:
            return out
        stored = stored_as(out)
        if cut.shares == 1:
            self.multiply(stored, cut)
        else:
            sums = torch.empty(cut.shares, self.rows, self.weight.shape[-2], dtype=torch.float32, device=out.device)
            self.multiply(sums, cut)
            launch_sum_shares(sums, stored, self.bias, self.residual, gated=self.gated, limit=self.limit)
        return stored.to(out.dtype)

    def cut(self, tile: StreamedTiling | None = None) -> Cut:
        """How the product is cut; tile: of the program, None: as `streamed_tiling` does."""
        (height, inputs), itemsize = self.weight.shape[-2:], self.weight.element_size()
        groups = 0 if self.ends is None else self.weight.shape[0]
        room = room_of(self.x.device)
        tile = tile or streamed_tiling(
            self.rows, height, inputs, room, groups=groups, itemsize=itemsize, gated=self.gated
        )
        share = triton.cdiv(triton.cdiv(inputs, tile.block_k), tile.shares) * tile.block_k
        return Cut(tile, share, triton.cdiv(inputs, share))

    def multiply(self, out: torch.Tensor, cut: Cut) -> None:
        """Launch the product: into `out` [T, N] whole, or where it is cut into shares their sums, fp32 [shares, T, N]
        (2 N with a gate). The plain kernel stands in where operands are not aligned for the bulk copy engine."""
        x, weight, ends, tokens, bias, residual, gated, limit = self
        outputs, (tile, share, shares) = self.outputs, cut
        if split := shares > 1:
            # Gate, bias and residual come after the sum of the shares.
            outputs, gated, bias, residual, limit = weight.shape[-2], False, None, None, None
        height = tile.block_n // (2 if gated else 1)
        programs, fp32_dot = triton.cdiv(outputs, height), x.device.type == "cpu"
        if tile.tma and is_describable(x) and is_describable(weight):
            streamed_tma_kernel[programs, shares](
                describe(x, tile.block_t, tile.block_k),
                describe(x, tile.block_more or tile.block_t, tile.block_k),
                describe(weight, height, tile.block_k),
                weight,
                bias,
                residual,
                out,
                self.rows,
                share,
                limit,
                N=outputs,
                K=x.shape[1],
                GATED=gated,
                SPLIT=split,
                BLOCK_T=tile.block_t,
                BLOCK_MORE=tile.block_more,
                HEIGHT=height,
                BLOCK_K=tile.block_k,
                STAGES=tile.stages,
                FP32_DOT=fp32_dot,
                num_warps=tile.num_warps,
                **dependent_launch(x.device),
            )
            return
        groups = 0 if ends is None else len(weight)
        streamed_kernel[programs, shares, self.rows if groups else 1](
            x,
            weight,
            ends,
            tokens,
            bias,
            residual,
            out,
            self.rows,
            x.stride(0),
            share,
            limit,
            N=outputs,
            K=x.shape[1],
            GROUPS=groups,
            GATED=gated,
            SPLIT=split,
            EVICTION="evict_first" if weight.nbytes > _KEPT_IN_CACHE else "",
            BLOCK_T=tile.block_t,
            BLOCK_MORE=tile.block_more,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            BLOCK_E=power_of_two(max(1, groups)),
            STAGES=tile.stages,
            FP32_DOT=fp32_dot,
            num_warps=tile.num_warps,
            **dependent_launch(x.device),
        )


def launch_sum_shares(
    sums: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    *,
    gated: bool = False,
    limit: float | None = None,
) -> None:
    """Launch what adds sums fp32 [shares, T, N] (2 N with a gate) up, and what comes after the product, into out
    [T, N]."""
    rows, outputs = out.shape
    sum_shares_kernel[(rows, triton.cdiv(outputs, _SUM_BLOCK))](
        sums,
        bias,
        residual,
        out,
        rows,
        limit,
        N=outputs,
        GATED=gated,
        SHARES=len(sums),
        BLOCK=_SUM_BLOCK,
        num_warps=4,
        **dependent_launch(out.device),
    )


_streamed_linear = define_op("spec_decode::streamed_linear", StreamedLinear)


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
