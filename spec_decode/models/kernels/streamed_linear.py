"""Linear layers over too many rows for skinny_linear and too few to keep a tensor core busy: bound by reading the
weight, which goes through once.

The weight is the tall side of the tensor core's product and the rows its narrow one, so that few rows leave little of
it empty: y^T = w x^T. A program owns a tile of outputs and, where K is split (split-K), a share of K, whose partial
sums a second kernel adds in order: a result has one order of summation whatever the device does.

Legend: M rows, T rows of x that M sorted rows are taken from, K inputs, N outputs, E weights. Products are of operands
in their own dtype (a weight of 8 bits is first converted to that of x); sums and what follows are in fp32, up to the
store.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from builders.errors import BatchError, require
from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, stored_as, tl, triton
from spec_decode.models.kernels.fp8_weight import Weight, is_scaled, operands, widened
from spec_decode.models.kernels.streamed_tiling import (
    MAX_GATED_ROWS,
    MAX_ROWS,
    StreamedTiling,
    room_of,
    streamed_tiling,
)
from spec_decode.models.kernels.streamed_tma_kernel import (
    describe,
    epilogue,
    is_describable,
    prefetch_weight,
    streamed_tma_kernel,
)
from spec_decode.models.kernels.swiglu import activated

_EVICT_ABOVE_BYTES = 32 << 20
"""Weights of more bytes are the first that the L2 cache drops: it would not hold them until the next step anyway."""

_SUM_BLOCK = 512
"""Outputs of a program that adds shares: 16 bytes of fp32 for each thread of its 4 warps."""


def num_shares(x: torch.Tensor, weight: Weight) -> int:
    """How many shares K is cut into for rows x [M, K] and weight [N, K]: more than 1 where N alone gives too few
    programs. 1 for more than MAX_ROWS rows, which are multiplied in parts."""
    values, scale = operands(weight)
    return 1 if x.shape[0] > MAX_ROWS else StreamedLinear(x, values, scale=scale).cut().shares


def streamed_linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    gated: bool = False,
    limit: float | None = None,
) -> torch.Tensor:
    """x @ weight^T, plus bias [N] and residual [M, N] where there are such; [M, N].

    x [M, K], adjacent along K; weight [N, K], contiguous, of x's dtype or in 8 bits. gated: weight [2 N, K] holds gate
    above up, and the result is silu(gate) * up, with a limit silu(min(gate, limit)) * clamp(up, -limit, limit), and
    there is no bias.
    A weight in 8 bits takes any number of rows and is read once for every MAX_ROWS of them; another takes 1 to
    MAX_ROWS, and 1 to MAX_GATED_ROWS if it is a gate of 16 bits. Raises BatchError for another number of rows, shapes
    or dtypes that do not fit, an empty weight and a limit without a gate, with nothing run.
    """
    values, scale = operands(weight)
    asked = StreamedLinear(x, values, bias=bias, residual=residual, gated=gated, limit=limit, scale=scale)
    require(
        scale is not None or 0 < x.shape[0] <= asked.most_rows,
        f"a streamed linear takes 1 to {asked.most_rows} rows, got {x.shape[0]}. Ask product_kind, and use "
        "torch's linear where it says so.",
    )
    return _streamed_linear(*asked.checked())


def streamed_groups(
    x: torch.Tensor,
    weight: Weight,
    ends: torch.Tensor,
    tokens: torch.Tensor | None = None,
    *,
    gated: bool = False,
    limit: float | None = None,
) -> torch.Tensor:
    """Rows sorted by group, each times its group's weight; [M, N].

    x       float [M, K], or [T, K] with tokens
    weight  of x's dtype or in 8 bits, [E, N, K], contiguous; gated: [E, 2 N, K], gate above up, and a row becomes
            silu(gate) * up
    ends    int32 [E]: one past each group's last row; rows from ends[-1] on are of the last group
    tokens  int64 [M], in 0..T-1: the row of x that each of the M rows is; None: they are x
    limit   of gated: with it, silu(min(gate, limit)) * clamp(up, -limit, limit)

    The weights of groups that have rows are read, once for every 16 of their rows. Raises BatchError for shapes or
    dtypes that do not fit, an empty weight and a limit without a gate, with nothing run.
    """
    values, scale = operands(weight)
    return _streamed_linear(*StreamedLinear(x, values, ends, tokens, gated=gated, limit=limit, scale=scale).checked())


class Cut(NamedTuple):
    """How a product is cut.

    tile    of a program
    share   inputs of one share; the last may have fewer
    shares  how many shares a row's K inputs are cut into
    """

    tile: StreamedTiling
    share: int
    shares: int


class StreamedLinear(NamedTuple):
    """Rows x, the weight or the weights of groups, and what comes after; None for what a form does without.

    As `streamed_linear` and `streamed_groups` have them. scale: that of a weight float8_e4m3fn, fp32 [N], with a gate
    [2 N], with ends [E, N] or [E, 2 N]. Returns the result [M, N] in x's dtype.
    """

    x: torch.Tensor
    weight: torch.Tensor
    ends: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    gated: bool = False
    limit: float | None = None
    scale: torch.Tensor | None = None

    @property
    def outputs(self) -> int:
        """N."""
        return self.weight.shape[-2] // 2 if self.gated else self.weight.shape[-2]

    @property
    def rows(self) -> int:
        """M."""
        return self.x.shape[0] if self.tokens is None else self.tokens.shape[0]

    @property
    def most_rows(self) -> int:
        """Rows that a launch takes where they are not sorted."""
        return MAX_GATED_ROWS if self.gated and self.weight.itemsize == 2 else MAX_ROWS

    def checked(self) -> StreamedLinear:
        """These. Raises BatchError for shapes or dtypes that do not fit, an empty weight, or a limit without a gate."""
        x, weight, ends, tokens, bias, residual = self[:6]
        if self.limit is not None and not self.gated:
            raise BatchError(
                f"a limit is of gate and up, got limit={self.limit} for a product without a gate. "
                "Pass gated=True, or no limit."
            )
        kind = (x.dtype, x.device)
        if not (
            x.dim() == 2
            and weight.dim() == (2 if ends is None else 3)
            and weight.numel() > 0
            and weight.shape[-1] == x.shape[1]
            and weight.is_contiguous()
            and x.stride(1) == 1
            and weight.device == x.device
            and is_scaled(weight, self.scale)
            and (self.scale is not None or weight.dtype == x.dtype)
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
                "a streamed linear needs contiguous tensors of one dtype, or a weight of 8 bits with its scale, and of "
                f"one device, whose sizes fit, and a weight that is not empty, got {found}. See its docstring for the "
                "shapes."
            )
        return self

    def reference(self) -> torch.Tensor:
        x = (self.x if self.tokens is None else self.x[self.tokens]).float()
        if self.ends is None:
            weight = widened(self.weight, self.scale)
            out = F.linear(x, weight, None if self.bias is None else self.bias.float())
        else:
            rows = torch.arange(self.rows, dtype=torch.int32, device=x.device)
            groups = torch.searchsorted(self.ends[:-1], rows, right=True)
            # Every row alone: torch's own sums depend on how many there are.
            out = x.new_empty(self.rows, self.weight.shape[1])
            for t in range(self.rows):
                # Not read on the host: the benchmark traces a draft's step through these formulas.
                group = groups[t : t + 1]
                scale = None if self.scale is None else self.scale.index_select(0, group)
                out[t] = F.linear(x[t : t + 1], widened(self.weight.index_select(0, group), scale)[0])[0]
        if self.gated:
            out = activated(out, self.limit)
        if self.residual is not None:
            out = self.residual.float() + out
        return out.to(self.x.dtype)

    def fake(self) -> torch.Tensor:
        return self.x.new_empty(self.rows, self.outputs)

    def launch(self, tile: StreamedTiling | None = None) -> torch.Tensor:
        """tile: how the kernel is cut; None: as `streamed_tiling` does."""
        out = self.fake()
        if not self.rows:
            return out
        stored = stored_as(out)
        if self.ends is not None or self.rows <= self.most_rows:
            self.launch_into(stored, tile)
        else:
            for start in range(0, self.rows, MAX_ROWS):
                rows = slice(start, start + MAX_ROWS)
                residual = None if self.residual is None else self.residual[rows]
                self._replace(x=self.x[rows], residual=residual).launch_into(stored[rows], tile)
        return stored.to(out.dtype)

    def launch_into(self, out: torch.Tensor, tile: StreamedTiling | None) -> None:
        """Launch all that gives out [M, N], of at most `most_rows` where they are not sorted; tile: see `launch`."""
        cut = self.cut(tile)
        if cut.shares == 1:
            self.multiply(out, cut)
        else:
            sums = torch.empty(cut.shares, self.rows, self.weight.shape[-2], dtype=torch.float32, device=out.device)
            self.multiply(sums, cut)
            launch_sum_shares(sums, out, self.bias, self.residual, gated=self.gated, limit=self.limit)

    def cut(self, tile: StreamedTiling | None = None) -> Cut:
        """How the product is cut; tile: of the program, None: as `streamed_tiling` does.

        Sorted rows have one tile of rows a program, which its threads fetch, as they do a weight in 8 bits.
        """
        (w_rows, inputs), itemsize = self.weight.shape[-2:], self.weight.element_size()
        groups = 0 if self.ends is None else self.weight.shape[0]
        room = room_of(self.x.device)
        tile = tile or streamed_tiling(
            self.rows, w_rows, inputs, room, groups=groups, itemsize=itemsize, gated=self.gated
        )
        # A share is whole blocks of K, rounded up: fewer shares than the tiling's may then cover K.
        share = cdiv(cdiv(inputs, tile.block_k), tile.shares) * tile.block_k
        return Cut(tile, share, cdiv(inputs, share))

    def multiply(self, out: torch.Tensor, cut: Cut) -> None:
        """Launch the product: into `out` [M, N] whole, or where it is cut into shares their sums, fp32 [shares, M, N]
        (2 N with a gate). The plain kernel stands in where operands are not aligned for the bulk copy engine."""
        x, weight, ends, tokens, bias, residual, gated, limit, scale = self
        outputs, (tile, share, shares) = self.outputs, cut
        if is_cut := shares > 1:
            # Gate, bias and residual come after the sum of the shares: to the kernel, both halves of a gated weight are
            # outputs of one without a gate.
            outputs, gated, bias, residual, limit = weight.shape[-2], False, None, None, None
        tile_n = tile.block_n // (2 if gated else 1)
        programs, fp32_dot = cdiv(outputs, tile_n), x.device.type == "cpu"
        if tile.tma and is_describable(x) and is_describable(weight):
            streamed_tma_kernel[programs, shares](
                x_desc=describe(x, tile.block_m, tile.block_k),
                x2_desc=describe(x, tile.block_m2 or tile.block_m, tile.block_k),
                w_desc=describe(weight, tile_n, tile.block_k),
                w_ptr=weight,
                bias_ptr=bias,
                residual_ptr=residual,
                y_ptr=out,
                M=self.rows,
                k_per_share=share,
                limit=limit,
                N=outputs,
                K=x.shape[1],
                GATED=gated,
                SPLIT_K=is_cut,
                BLOCK_M=tile.block_m,
                BLOCK_M2=tile.block_m2,
                TILE_N=tile_n,
                BLOCK_K=tile.block_k,
                STAGES=tile.stages,
                FP32_DOT=fp32_dot,
                num_warps=tile.num_warps,
                **dependent_launch(x.device),
            )
            return
        groups = 0 if ends is None else len(weight)
        # Rows share the first axis with the tiles: the others have 65,535 programs at most.
        streamed_kernel[programs * (self.rows if groups else 1), shares](
            x_ptr=x,
            w_ptr=weight,
            scale_ptr=scale,
            ends_ptr=ends,
            tokens_ptr=tokens,
            bias_ptr=bias,
            residual_ptr=residual,
            y_ptr=out,
            M=self.rows,
            stride_xm=x.stride(0),
            k_per_share=share,
            limit=limit,
            N=outputs,
            K=x.shape[1],
            GROUPS=groups,
            GATED=gated,
            SPLIT_K=is_cut,
            EVICTION="evict_first" if weight.nbytes > _EVICT_ABOVE_BYTES else "",
            BLOCK_M=tile.block_m,
            BLOCK_M2=tile.block_m2,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            BLOCK_E=next_power_of_2(groups),
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
    """Launch what adds sums fp32 [shares, M, N] (2 N with a gate) up, and what comes after the product, into out
    [M, N]."""
    rows, outputs = out.shape
    sum_shares_kernel[(rows, cdiv(outputs, _SUM_BLOCK))](
        sums_ptr=sums,
        bias_ptr=bias,
        residual_ptr=residual,
        y_ptr=out,
        M=rows,
        limit=limit,
        N=outputs,
        GATED=gated,
        NUM_SHARES=len(sums),
        BLOCK_N=_SUM_BLOCK,
        num_warps=4,
        **dependent_launch(out.device),
    )


_streamed_linear = define_op("spec_decode::streamed_linear", StreamedLinear)


@triton.jit
def streamed_kernel(
    x_ptr,  # [M, K]; with tokens [T, K]
    w_ptr,  # [N, K], with a gate [2 N, K]; with ends [E, N, K] or [E, 2 N, K]
    scale_ptr,  # of w, or None: fp32 [N], with a gate [2 N]; with ends [E, N] or [E, 2 N]
    ends_ptr,  # int32 [E], one past each group's last row, or None
    tokens_ptr,  # int64 [M], the row of x for each sorted row, or None
    bias_ptr,  # [N], or None
    residual_ptr,  # [M, N], or None
    y_ptr,  # out: [M, N]; SPLIT_K: fp32 [shares, M, N]
    M,
    stride_xm,  # of a row
    k_per_share,  # inputs of a program, a multiple of BLOCK_K
    limit,  # the gate's maximum, and up's in absolute value; or None
    N: tl.constexpr,  # SPLIT_K: all rows of the weight
    K: tl.constexpr,
    GROUPS: tl.constexpr,  # E; 0 without ends
    GATED: tl.constexpr,  # w is gate above up; never with SPLIT_K
    SPLIT_K: tl.constexpr,  # store a share's sums as they are, for sum_shares_kernel
    EVICTION: tl.constexpr,  # the eviction policy of the weight's loads; "" is the default one
    BLOCK_M: tl.constexpr,  # rows of the first tile
    BLOCK_M2: tl.constexpr,  # rows of the second tile, or 0
    BLOCK_N: tl.constexpr,  # rows of the weight in a tile; with a gate half of them are the up projection's
    BLOCK_K: tl.constexpr,  # inputs multiplied at a time
    BLOCK_E: tl.constexpr,  # E, rounded up to a power of two
    STAGES: tl.constexpr,  # tiles in flight
    FP32_DOT: tl.constexpr,  # multiply in fp32, for the interpreter
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """y = epilogue(x @ w^T * scale). A program has one tile of outputs, and one share of K, for all rows or a group's.

    Epilogue: silu(gate) * up with a gate, else + bias; then + residual. A tile of the weight is loaded once and
    multiplied with BLOCK_M rows and BLOCK_M2 rows after them: a tile's sizes are powers of two, and 80 rows make 64 and
    16. Grid [tiles of outputs, shares].

    With ends_ptr BLOCK_M2 is 0 and the grid is [M * tiles of outputs, shares]: the host does not know where groups end,
    so every sorted row has a program for each tile, and those of one row are neighbours. Only the programs of every
    BLOCK_M-th row of a group have work.
    """
    # 1. The outputs and the share of this program. With a gate the first half of a tile's rows are of the gate, the
    # second of the up projection for the same outputs: rows n and N + n of w. _store takes the halves apart.
    TILE_N: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    NUM_TILES: tl.constexpr = (N + TILE_N - 1) // TILE_N
    W_ROWS: tl.constexpr = N * (2 if GATED else 1)  # of one weight
    pid_n = tl.program_id(0) if ends_ptr is None else tl.program_id(0) % NUM_TILES
    tile_row = tl.arange(0, BLOCK_N)
    n_start = pid_n * TILE_N
    offs_n = n_start + tile_row % TILE_N  # the output of each row of the tile
    offs_w = offs_n + (tile_row // TILE_N) * N  # its row of w
    mask_n = offs_n < N
    k_start = tl.program_id(1) * k_per_share
    # The weight is no result of an earlier kernel, so it may be fetched before the wait. ends_ptr is one, and it says
    # which group's weight this program reads.
    if ends_ptr is None:
        prefetch_weight(w_ptr, offs_w, k_start, W_ROWS, K, BLOCK_K, PDL)
    await_previous(PDL)

    # 2. The rows of this program, up to m_end, in one tile or two, and where their inputs start
    offs_m = tl.arange(0, BLOCK_M)
    m_end = M
    if ends_ptr is not None:
        # offs_m becomes sorted_row and the BLOCK_M - 1 rows after it, or M throughout for a program without rows.
        sorted_row = tl.program_id(0) // NUM_TILES
        offs_m, m_end, group = _rows_of_group(ends_ptr, sorted_row, offs_m, M, GROUPS, BLOCK_M, BLOCK_E)
        w_ptr += group.to(tl.int64) * W_ROWS * K
        if scale_ptr is not None:
            scale_ptr += group.to(tl.int64) * W_ROWS
    x_rows = offs_m if tokens_ptr is None else tl.load(tokens_ptr + offs_m, mask=offs_m < m_end, other=0)
    w_ptrs = w_ptr + offs_w.to(tl.int64)[:, None] * K
    x_ptrs = x_ptr + x_rows.to(tl.int64)[None, :] * stride_xm
    # A program without rows has no inputs: the loop does not run, and the store is masked.
    k_end = tl.where(tl.min(offs_m, 0) < m_end, tl.minimum(k_start + k_per_share, K), k_start)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if BLOCK_M2:
        offs_m2 = BLOCK_M + tl.arange(0, BLOCK_M2)
        x2_ptrs = x_ptr + offs_m2.to(tl.int64)[None, :] * stride_xm
        acc2 = tl.zeros((BLOCK_N, BLOCK_M2), tl.float32)

    # 3. w @ x^T, BLOCK_K inputs at a time: acc [BLOCK_N, BLOCK_M], acc2 [BLOCK_N, BLOCK_M2]. Shares are multiples of
    # BLOCK_K, so only the end of K cuts a block short. "ieee" keeps fp32 operands from being rounded to TF32.
    for k in tl.range(k_start, k_end, BLOCK_K, num_stages=STAGES):
        offs_k = k + tl.arange(0, BLOCK_K)
        if K % BLOCK_K == 0:
            w = tl.load(w_ptrs + offs_k[None, :], mask=mask_n[:, None], other=0.0, eviction_policy=EVICTION)
        else:
            w = tl.load(
                w_ptrs + offs_k[None, :],
                mask=mask_n[:, None] & (offs_k < K)[None, :],
                other=0.0,
                eviction_policy=EVICTION,
            )
        if FP32_DOT:
            w = w.to(tl.float32)
        elif scale_ptr is not None:
            # By way of fp32: a GPU's conversion straight to bf16 takes a number at a time, in its slowest unit.
            w = w.to(tl.float32).to(x_ptr.dtype.element_ty)
        x = _load_x(x_ptrs, offs_m, m_end, offs_k, K, BLOCK_K, FP32_DOT)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if BLOCK_M2:
            x2 = _load_x(x2_ptrs, offs_m2, m_end, offs_k, K, BLOCK_K, FP32_DOT)
            acc2 = tl.dot(w, x2, acc2, input_precision="ieee")

    # 4. The scale, the epilogue, and the store
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + offs_w, mask=mask_n, other=0.0)[:, None]
        acc *= scale
        if BLOCK_M2:
            acc2 *= scale
    _store(
        acc=acc,
        offs_m=offs_m,
        m_end=m_end,
        bias_ptr=bias_ptr,
        residual_ptr=residual_ptr,
        y_ptr=y_ptr,
        M=M,
        limit=limit,
        n_start=n_start,
        N=N,
        GATED=GATED,
        SPLIT_K=SPLIT_K,
        BLOCK_M=BLOCK_M,
        TILE_N=TILE_N,
    )
    if BLOCK_M2:
        _store(
            acc=acc2,
            offs_m=offs_m2,
            m_end=m_end,
            bias_ptr=bias_ptr,
            residual_ptr=residual_ptr,
            y_ptr=y_ptr,
            M=M,
            limit=limit,
            n_start=n_start,
            N=N,
            GATED=GATED,
            SPLIT_K=SPLIT_K,
            BLOCK_M=BLOCK_M2,
            TILE_N=TILE_N,
        )


@triton.jit
def sum_shares_kernel(
    sums_ptr,  # fp32 [shares, M, N], with a gate [shares, M, 2 N]
    bias_ptr,  # [N], or None
    residual_ptr,  # [M, N], or None
    y_ptr,  # out: [M, N]
    M,
    limit,  # the gate's maximum, and up's in absolute value; or None
    N: tl.constexpr,
    GATED: tl.constexpr,
    NUM_SHARES: tl.constexpr,
    BLOCK_N: tl.constexpr,  # outputs of a program
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """y = epilogue(sum of the shares). A program has BLOCK_N outputs of one row; grid [M, ceil(N / BLOCK_N)]."""
    await_previous(PDL)
    W_ROWS: tl.constexpr = N * (2 if GATED else 1)
    m = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs_n < N
    y = tl.zeros((BLOCK_N,), tl.float32)
    up = tl.zeros((BLOCK_N,), tl.float32)
    # Unrolled, so that all loads are on their way before the first sum waits for one.
    for share in tl.static_range(NUM_SHARES):
        sums_ptrs = sums_ptr + (share * M + m) * W_ROWS + offs_n
        y += tl.load(sums_ptrs, mask=mask, other=0.0)
        if GATED:
            up += tl.load(sums_ptrs + N, mask=mask, other=0.0)
    epilogue(y, up, bias_ptr, residual_ptr, y_ptr, m, offs_n, mask, limit, N, GATED)


@triton.jit
def _load_x(
    x_ptrs,  # where each row's inputs start, [1, rows]
    offs_m,  # [rows]
    m_end,
    offs_k,  # [BLOCK_K]
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FP32_DOT: tl.constexpr,
):
    """A tile of x^T, [BLOCK_K, rows]."""
    if K % BLOCK_K == 0:
        x = tl.load(x_ptrs + offs_k[:, None], mask=(offs_m < m_end)[None, :], other=0.0)
    else:
        x = tl.load(x_ptrs + offs_k[:, None], mask=(offs_m < m_end)[None, :] & (offs_k < K)[:, None], other=0.0)
    if FP32_DOT:
        x = x.to(tl.float32)
    return x


@triton.jit
def _store(
    acc,  # fp32 [BLOCK_N, BLOCK_M]
    offs_m,  # [BLOCK_M]
    m_end,  # one past the last row that is stored
    bias_ptr,  # [N], or None
    residual_ptr,  # [M, N], or None
    y_ptr,  # out: [M, N]; SPLIT_K: fp32 [shares, M, N]
    M,
    limit,  # the gate's maximum, and up's in absolute value; or None
    n_start,  # the program's first output
    N: tl.constexpr,
    GATED: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_N: tl.constexpr,  # outputs of a program
):
    """Store acc^T: a share's sums as they are, or whole ones after the epilogue."""
    y = tl.trans(acc)
    offs_n = n_start + tl.arange(0, TILE_N)[None, :]
    mask = (offs_m < m_end)[:, None] & (offs_n < N)
    if SPLIT_K:
        share = tl.program_id(1)
        y_ptrs = y_ptr + (share * M + offs_m).to(tl.int64)[:, None] * N + offs_n
        tl.store(y_ptrs, y, mask=mask)
    else:
        up = y
        if GATED:
            # y's columns are TILE_N of the gate, then TILE_N of the up projection. tl.split wants the two as the last
            # axis: [BLOCK_M, 2, TILE_N] becomes [BLOCK_M, TILE_N, 2].
            halves = tl.permute(tl.reshape(y, (BLOCK_M, 2, TILE_N)), (0, 2, 1))
            y, up = tl.split(halves)
        epilogue(y, up, bias_ptr, residual_ptr, y_ptr, offs_m.to(tl.int64)[:, None], offs_n, mask, limit, N, GATED)


@triton.jit
def _rows_of_group(
    ends_ptr,  # int32 [E]
    sorted_row,  # that this program was launched for
    offs_m,  # [BLOCK_M], counted from the first of this program
    M,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """The sorted rows of this program, one past their group's last, and the group. Without rows all are M, the number
    of sorted rows.

    Of a group's rows every BLOCK_M-th has a tile, and the programs of the others have no rows.
    """
    INT32_MAX: tl.constexpr = 2**31 - 1
    offs_e = tl.arange(0, BLOCK_E)
    # The last group has no end, so that every row belongs to one.
    ends = tl.load(ends_ptr + offs_e, mask=offs_e < GROUPS - 1, other=INT32_MAX)
    is_before = ends <= sorted_row
    group = tl.sum(is_before.to(tl.int32), 0)
    m_start = tl.max(tl.where(is_before, ends, 0), 0)
    m_end = tl.minimum(tl.min(tl.where(is_before, INT32_MAX, ends), 0), M)
    return tl.where((sorted_row - m_start) % BLOCK_M == 0, sorted_row + offs_m, M), m_end, group
