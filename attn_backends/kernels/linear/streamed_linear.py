"""Linear layers over too many rows for skinny_linear and too few to keep a tensor core busy: bound by reading the
weight, which is read once.

The product is y^T = w x^T: the weight is the tensor core's tall operand and the rows its narrow one, so few rows waste
little of it. A program owns a tile of outputs. If K is split (split-K), it owns a share of K, and a second kernel adds
the partial sums in order, so the order of summation does not depend on scheduling.

Legend: M rows, T rows of x that M sorted rows are gathered from, K inputs, N outputs, E weights. Products take operands
in their own dtype: an 8-bit weight is converted to x's, unless x is rounded to 8 bits too, which tensor cores then
multiply as they are. Sums and the epilogue are in fp32 until the store. But Hopper's tensor cores add the products of
8-bit numbers with about 14 bits: all those of a share, as in torch's fast sums, because adding parts of them in fp32
would take registers and time. That is max_num_imprecise_acc's default.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from attn_backends.kernels.linear.fp8_weight import Weight, is_scaled, operands, widened
from attn_backends.kernels.linear.narrow_rows import NarrowRows
from attn_backends.kernels.linear.streamed_tiling import (
    MAX_GATED_ROWS,
    MAX_NARROW_ROWS,
    MAX_ROWS,
    StreamedTiling,
    streamed_tiling,
)
from attn_backends.kernels.linear.streamed_tma_kernel import (
    describe,
    epilogue,
    is_describable,
    prefetch_weight,
    streamed_tma_kernel,
)
from attn_backends.kernels.linear.swiglu import activated
from builders.devices import room_of
from builders.errors import BatchError, require
from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, stored_as, tl, triton

_EVICT_ABOVE_BYTES = 32 << 20
"""Larger weights are evicted first from the L2 cache, which would not hold them until the next step anyway."""

_WIDE_ROWS = 4096
"""Outputs of an 8-bit weight that torch's implementation widens at once."""

_SUM_BLOCK = 512
"""Outputs per program of the kernel that adds shares: 16 bytes of fp32 for each thread of its 4 warps."""


def num_shares(x: torch.Tensor, weight: Weight, *, round_x: bool = False) -> int:
    """Return the number of split-K shares for rows x [M, K] and weight [N, K]: above 1 if N gives too few programs, and
    1 for more rows than a launch takes, which are multiplied in parts. round_x: see `streamed_linear`."""
    values, scale = operands(weight)
    product = StreamedLinear(x, values, scale=scale, round_x=round_x)
    return 1 if product.rows > product.most_rows else product.cut().shares


def streamed_linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    gated: bool = False,
    limit: float | None = None,
    round_x: bool = False,
) -> torch.Tensor:
    """Return x @ weight^T, plus bias [N] and residual [M, N] if given; [M, N].

    x: [M, K], contiguous along K; weight: [N, K], contiguous, of x's dtype or in 8 bits. gated: weight [2 N, K] holds
    gate above up, and the result is silu(gate) * up, or with a limit silu(min(gate, limit)) * clamp(up, -limit, limit);
    a bias is not allowed. round_x: 16-bit x is first rounded to 8 bits, as by `narrow_rows`; only with an 8-bit weight,
    and on a GPU whose tensor cores multiply 8-bit numbers. An 8-bit weight takes any number of rows and is read once
    for every MAX_ROWS of them, or MAX_NARROW_ROWS that are rounded. Other weights take 1 to MAX_ROWS rows, or 1 to
    MAX_GATED_ROWS for a 16-bit gate. Raises BatchError for another number of rows, shapes or dtypes that do not fit, an
    empty weight and a limit without a gate, before any launch.
    """
    values, scale = operands(weight)
    arguments = StreamedLinear(x, values, None, None, bias, residual, gated, limit, scale, None, round_x)
    require(
        scale is not None or 0 < x.shape[0] <= arguments.most_rows,
        f"a streamed linear takes 1 to {arguments.most_rows} rows, got {x.shape[0]}. Choose the kernel with "
        "product_kind.",
    )
    return _streamed_linear(*arguments.checked())


def streamed_groups(
    x: torch.Tensor,
    weight: Weight,
    ends: torch.Tensor,
    tokens: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
) -> torch.Tensor:
    """Multiply rows sorted by group by their group's weight; [M, N].

    x       float [M, K], or [T, K] with tokens
    weight  [E, N, K], contiguous, of x's dtype or in 8 bits; gated: [E, 2 N, K], gate above up, and a row becomes
            silu(gate) * up
    ends    int32 [E]: one past each group's last row; rows from ends[-1] on belong to the last group
    tokens  int64 [M], in 0..T-1: the row of x for each of the M rows; None: the rows are x
    bias    [E, N] in x's dtype, with a gate [E, 2 N]: added to the product of each group
    limit   with gated: as in `swiglu`
    alpha   the same

    Only the weights of groups with rows are read, once for every 16 of their rows. Raises BatchError for shapes or
    dtypes that do not fit, an empty weight and a limit or alpha without a gate, before any launch.
    """
    values, scale = operands(weight)
    arguments = StreamedLinear(x, values, ends, tokens, bias, None, gated, limit, scale, alpha)
    return _streamed_linear(*arguments.checked())


class Cut(NamedTuple):
    """How a product is split.

    tile    the tiling of a program
    share   inputs of one share; the last can have fewer
    shares  the number of shares that K is split into
    """

    tile: StreamedTiling
    share: int
    shares: int


class StreamedLinear(NamedTuple):
    """The arguments of `streamed_linear` and `streamed_groups`; None for an absent one.

    scale: fp32 [N] for a weight in float8_e4m3fn; with a gate [2 N], with ends [E, N] or [E, 2 N]. bias: of the same
    shapes in x's dtype, with a gate only for groups. alpha: see `swiglu`, only for groups. round_x: round x to 8 bits.
    Returns the result [M, N] in x's dtype.
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
    alpha: float | None = None
    round_x: bool = False

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
        """The most unsorted rows per launch."""
        if self.round_x:
            return MAX_NARROW_ROWS
        return MAX_GATED_ROWS if self.gated and self.weight.itemsize == 2 else MAX_ROWS

    def checked(self) -> StreamedLinear:
        """Return self. Raises BatchError for tensors that do not fit, an empty weight, or a limit or alpha without a
        gate."""
        x, weight, ends, tokens, bias, residual = self[:6]
        for name, value in (("limit", self.limit), ("alpha", self.alpha)):
            if value is not None and not self.gated:
                raise BatchError(
                    f"{name} needs a gate, got {name}={value} with gated=False. Pass gated=True, or no {name}."
                )
        require(
            not self.round_x or (self.scale is not None and x.itemsize == 2),
            f"only 16-bit rows of an 8-bit weight are rounded, got round_x=True with x {x.dtype} and weight "
            f"{weight.dtype}. Pass an Fp8Weight and 16-bit rows, or round_x=False.",
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
            and not (self.gated and ((bias is not None and ends is None) or weight.shape[-2] % 2))
            and (self.alpha is None or ends is not None)
            and (ends is None or (ends.shape == weight.shape[:1] and ends.dtype == torch.int32))
            and (tokens is None or (ends is not None and tokens.dim() == 1 and tokens.dtype == torch.int64))
            and (bias is None or (bias.shape == weight.shape[:-1] and bias.is_contiguous()))
            and (residual is None or (residual.shape == (self.rows, self.outputs) and residual.is_contiguous()))
            and all(each is None or (each.dtype, each.device) == kind for each in (bias, residual))
            and all(each is None or (each.is_contiguous() and each.device == x.device) for each in (ends, tokens))
        ):
            tensors = {name: value for name, value in self._asdict().items() if isinstance(value, torch.Tensor)}
            given = ", ".join(f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors.items())
            raise BatchError(
                "a streamed linear needs contiguous tensors of fitting sizes on one device, of one dtype or with an "
                f"8-bit weight and its scale, and a weight that is not empty, got {given}. See its docstring for the "
                "shapes."
            )
        return self

    def reference(self) -> torch.Tensor:
        x = widened(*NarrowRows(self.x).reference()) if self.round_x else self.x.float()
        x = x if self.tokens is None else x[self.tokens]
        if self.ends is None:
            bias = None if self.bias is None else self.bias.float()
            out = F.linear(x, self.weight.float(), bias) if self.scale is None else self._in_parts(x, self.scale)
            out = out if bias is None or self.scale is None else out + bias
        else:
            rows = torch.arange(self.rows, dtype=torch.int32, device=x.device)
            groups = torch.searchsorted(self.ends[:-1], rows, right=True)
            # Row by row, because torch's sums depend on the number of rows.
            out = x.new_empty(self.rows, self.weight.shape[1])
            for t in range(self.rows):
                # No host read: the benchmark traces a draft's step through this code.
                group = groups[t : t + 1]
                scale = None if self.scale is None else self.scale.index_select(0, group)
                out[t] = F.linear(x[t : t + 1], widened(self.weight.index_select(0, group), scale)[0])[0]
            if self.bias is not None:
                out += self.bias[groups].float()
        if self.gated:
            out = activated(out, self.limit, self.alpha)
        if self.residual is not None:
            out = self.residual.float() + out
        return out.to(self.x.dtype)

    def _in_parts(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Multiply by an 8-bit weight, of which only some outputs exist in fp32 at once."""
        parts = zip(self.weight.split(_WIDE_ROWS), scale.split(_WIDE_ROWS), strict=True)
        return torch.cat([F.linear(x, widened(*part)) for part in parts], 1)

    def fake(self) -> torch.Tensor:
        return self.x.new_empty(self.rows, self.outputs)

    def launch(self, tile: StreamedTiling | None = None) -> torch.Tensor:
        """tile: the kernel's tiling; None: `streamed_tiling`'s."""
        out = self.fake()
        if not self.rows:
            return out
        stored = stored_as(out)
        if self.ends is not None or self.rows <= self.most_rows:
            self.launch_into(stored, tile)
        else:
            for start in range(0, self.rows, self.most_rows):
                rows = slice(start, start + self.most_rows)
                residual = None if self.residual is None else self.residual[rows]
                self._replace(x=self.x[rows], residual=residual).launch_into(stored[rows], tile)
        return stored.to(out.dtype)

    def launch_into(self, out: torch.Tensor, tile: StreamedTiling | None) -> None:
        """Launch the kernels for out [M, N], at most `most_rows` rows unless they are sorted; tile: see `launch`."""
        cut = self.cut(tile)
        if cut.shares == 1:
            self.multiply(out, cut)
        else:
            sums = torch.empty(cut.shares, self.rows, self.weight.shape[-2], dtype=torch.float32, device=out.device)
            self.multiply(sums, cut)
            launch_sum_shares(sums, out, self.bias, self.residual, gated=self.gated, limit=self.limit)

    def cut(self, tile: StreamedTiling | None = None) -> Cut:
        """Return how the product is split. tile: the program's tiling; None: `streamed_tiling`'s.

        Programs over sorted rows have one tile of rows. Their threads load it, as they load an 8-bit weight for 16-bit
        rows.
        """
        (w_rows, inputs), itemsize = self.weight.shape[-2:], self.weight.element_size()
        groups = 0 if self.ends is None else self.weight.shape[0]
        room, x_itemsize = room_of(self.x.device), 1 if self.round_x else self.x.element_size()
        tile = tile or streamed_tiling(
            self.rows, w_rows, inputs, room, groups=groups, itemsize=itemsize, x_itemsize=x_itemsize, gated=self.gated
        )
        # A share is rounded up to whole blocks of K, so fewer shares than the tiling's can cover K.
        share = cdiv(cdiv(inputs, tile.block_k), tile.shares) * tile.block_k
        return Cut(tile, share, cdiv(inputs, share))

    def multiply(self, out: torch.Tensor, cut: Cut) -> None:
        """Launch the product into `out` [M, N] or, with split-K, its partial sums into fp32 [shares, M, N] (2 N with a
        gate). The plain kernel runs if the operands are not aligned for the bulk copy engine."""
        x, weight, ends, tokens, bias, residual, gated, limit, scale, alpha, round_x = self
        x, x_scale = NarrowRows(x).launch() if round_x else (x, None)
        outputs, (tile, share, shares) = self.outputs, cut
        if is_cut := shares > 1:
            # Gate, bias and residual are applied after the sum of the shares: the kernel treats a gated weight as a
            # weight of 2 N outputs without a gate.
            outputs, gated, bias, residual, limit = weight.shape[-2], False, None, None, None
        tile_n = tile.block_n // (2 if gated else 1)
        programs, fp32_dot = cdiv(outputs, tile_n), x.device.type == "cpu"
        if tile.tma and is_describable(x) and is_describable(weight):
            streamed_tma_kernel[programs, shares](
                x_desc=describe(x, tile.block_m, tile.block_k),
                x2_desc=describe(x, tile.block_m2 or tile.block_m, tile.block_k),
                w_desc=describe(weight, tile_n, tile.block_k),
                w_ptr=weight,
                scale_ptr=scale,
                x_scale_ptr=x_scale,
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
        # Rows share the first grid axis with the tiles: the other axes allow 65,535 programs.
        streamed_kernel[programs * (self.rows if groups else 1), shares](
            x_ptr=x,
            w_ptr=weight,
            scale_ptr=scale,
            x_scale_ptr=x_scale,
            ends_ptr=ends,
            tokens_ptr=tokens,
            bias_ptr=bias,
            residual_ptr=residual,
            y_ptr=out,
            M=self.rows,
            stride_xm=x.stride(0),
            k_per_share=share,
            limit=limit,
            alpha=alpha,
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
    """Launch the kernel that adds sums fp32 [shares, M, N] (2 N with a gate) and the epilogue's terms into out
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


_streamed_linear = define_op("attn_backends::streamed_linear", StreamedLinear)


# A kernel for multiples of 16 rows alone would differ in a few masks, and both would have to be compiled.
@triton.jit(do_not_specialize=["M"])
def streamed_kernel(
    x_ptr,  # [M, K]; with tokens [T, K]
    w_ptr,  # [N, K], with a gate [2 N, K]; with ends [E, N, K] or [E, 2 N, K]
    scale_ptr,  # of w, or None: fp32 [N], with a gate [2 N]; with ends [E, N] or [E, 2 N]
    x_scale_ptr,  # of x in 8 bits, or None: fp32 [M]; with tokens [T]
    ends_ptr,  # int32 [E], one past each group's last row, or None
    tokens_ptr,  # int64 [M], the row of x for each sorted row, or None
    bias_ptr,  # [N], with ends [E, N] or with a gate [E, 2 N]; or None
    residual_ptr,  # [M, N], or None
    y_ptr,  # out: [M, N]; SPLIT_K: fp32 [shares, M, N]
    M,
    stride_xm,  # between rows
    k_per_share,  # inputs per program, a multiple of BLOCK_K
    limit,  # upper bound of the gate, and of up's absolute value; or None
    alpha,  # see `activate`; or None
    N: tl.constexpr,  # SPLIT_K: all rows of the weight
    K: tl.constexpr,
    GROUPS: tl.constexpr,  # E; 0 without ends
    GATED: tl.constexpr,  # w is gate above up; never with SPLIT_K
    SPLIT_K: tl.constexpr,  # store a share's partial sums, for sum_shares_kernel
    EVICTION: tl.constexpr,  # eviction policy of the weight's loads; "" is the default
    BLOCK_M: tl.constexpr,  # rows of the first tile
    BLOCK_M2: tl.constexpr,  # rows of the second tile, or 0
    BLOCK_N: tl.constexpr,  # weight rows in a tile; with a gate half of them belong to the up projection
    BLOCK_K: tl.constexpr,  # inputs per iteration
    BLOCK_E: tl.constexpr,  # E, rounded up to a power of two
    STAGES: tl.constexpr,  # tiles in flight
    FP32_DOT: tl.constexpr,  # multiply in fp32, for the interpreter
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """y = epilogue(x @ w^T * scales). A program has one tile of outputs and one share of K, for all rows or a group's.

    Epilogue: + bias; with a gate activate(gate, up); then + residual. A tile of the weight is loaded once and
    multiplied by BLOCK_M rows and the BLOCK_M2 rows after them: tile sizes are powers of two, so 80 rows use 64 and 16.
    Grid [tiles of outputs, shares].

    With ends_ptr, BLOCK_M2 is 0 and the grid is [M * tiles of outputs, shares]: the host does not know where groups
    end, so every sorted row has a program for each tile, and the programs of one row are neighbours. Only the programs
    of every BLOCK_M-th row of a group have work.
    """
    # 1. The outputs and the share of this program. With a gate, the first half of a tile's rows are gate rows, the
    # second half up rows for the same outputs: rows n and N + n of w. _store splits the halves.
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
    # No earlier kernel writes the weight, so it can be fetched before the wait. But one writes ends_ptr, which
    # determines the group whose weight this program reads.
    if ends_ptr is None:
        prefetch_weight(w_ptr, offs_w, k_start, W_ROWS, K, BLOCK_K, PDL)
    await_previous(PDL)

    # 2. The rows of this program, up to m_end, in one or two tiles, and pointers to their inputs
    offs_m = tl.arange(0, BLOCK_M)
    m_end = M
    if ends_ptr is not None:
        # offs_m becomes sorted_row and the BLOCK_M - 1 rows after it, or M throughout for a program without rows.
        sorted_row = tl.program_id(0) // NUM_TILES
        offs_m, m_end, group = _rows_of_group(ends_ptr, sorted_row, offs_m, M, GROUPS, BLOCK_M, BLOCK_E)
        w_ptr += group.to(tl.int64) * W_ROWS * K
        if scale_ptr is not None:
            scale_ptr += group.to(tl.int64) * W_ROWS
        if bias_ptr is not None:
            bias_ptr += group.to(tl.int64) * W_ROWS
    x_rows = offs_m if tokens_ptr is None else tl.load(tokens_ptr + offs_m, mask=offs_m < m_end, other=0)
    w_ptrs = w_ptr + offs_w.to(tl.int64)[:, None] * K
    x_ptrs = x_ptr + x_rows.to(tl.int64)[None, :] * stride_xm
    # A program without rows has no inputs: it skips the loop, and its store is masked.
    k_end = tl.where(tl.min(offs_m, 0) < m_end, tl.minimum(k_start + k_per_share, K), k_start)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if BLOCK_M2:
        offs_m2 = BLOCK_M + tl.arange(0, BLOCK_M2)
        x2_ptrs = x_ptr + offs_m2.to(tl.int64)[None, :] * stride_xm
        acc2 = tl.zeros((BLOCK_N, BLOCK_M2), tl.float32)

    # 3. w @ x^T, in blocks of BLOCK_K inputs: acc [BLOCK_N, BLOCK_M], acc2 [BLOCK_N, BLOCK_M2]. Shares are multiples of
    # BLOCK_K, so only the last block of K can be partial. "ieee" keeps fp32 operands from being rounded to TF32.
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
        elif scale_ptr is not None and x_scale_ptr is None:
            # By way of fp32: a GPU converts to bf16 one number at a time, in its slowest unit.
            w = w.to(tl.float32).to(x_ptr.dtype.element_ty)
        x = _load_x(x_ptrs, offs_m, m_end, offs_k, K, BLOCK_K, FP32_DOT)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if BLOCK_M2:
            x2 = _load_x(x2_ptrs, offs_m2, m_end, offs_k, K, BLOCK_K, FP32_DOT)
            acc2 = tl.dot(w, x2, acc2, input_precision="ieee")

    # 4. The scales, the epilogue, and the store
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + offs_w, mask=mask_n, other=0.0)[:, None]
        acc *= scale
        if BLOCK_M2:
            acc2 *= scale
    if x_scale_ptr is not None:
        acc *= tl.load(x_scale_ptr + x_rows, mask=offs_m < m_end, other=0.0)[None, :]
        if BLOCK_M2:
            acc2 *= tl.load(x_scale_ptr + offs_m2, mask=offs_m2 < m_end, other=0.0)[None, :]
    _store(
        acc=acc,
        offs_m=offs_m,
        m_end=m_end,
        bias_ptr=bias_ptr,
        residual_ptr=residual_ptr,
        y_ptr=y_ptr,
        M=M,
        limit=limit,
        alpha=alpha,
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
            alpha=alpha,
            n_start=n_start,
            N=N,
            GATED=GATED,
            SPLIT_K=SPLIT_K,
            BLOCK_M=BLOCK_M2,
            TILE_N=TILE_N,
        )


@triton.jit(do_not_specialize=["M"])
def sum_shares_kernel(
    sums_ptr,  # fp32 [shares, M, N], with a gate [shares, M, 2 N]
    bias_ptr,  # [N], or None
    residual_ptr,  # [M, N], or None
    y_ptr,  # out: [M, N]
    M,
    limit,  # upper bound of the gate, and of up's absolute value; or None
    N: tl.constexpr,
    GATED: tl.constexpr,
    NUM_SHARES: tl.constexpr,
    BLOCK_N: tl.constexpr,  # outputs per program
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
    # Unrolled, so all loads are in flight before the first addition waits for one.
    for share in tl.static_range(NUM_SHARES):
        sums_ptrs = sums_ptr + (share * M + m) * W_ROWS + offs_n
        y += tl.load(sums_ptrs, mask=mask, other=0.0)
        if GATED:
            up += tl.load(sums_ptrs + N, mask=mask, other=0.0)
    epilogue(y, up, bias_ptr, residual_ptr, y_ptr, m, offs_n, mask, limit, N, GATED)


@triton.jit
def _load_x(
    x_ptrs,  # start of each row's inputs, [1, rows]
    offs_m,  # [rows]
    m_end,
    offs_k,  # [BLOCK_K]
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FP32_DOT: tl.constexpr,
):
    """Load a tile of x^T, [BLOCK_K, rows]."""
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
    m_end,  # one past the last row to store
    bias_ptr,  # [N], with a gate [2 N]; or None
    residual_ptr,  # [M, N], or None
    y_ptr,  # out: [M, N]; SPLIT_K: fp32 [shares, M, N]
    M,
    limit,  # upper bound of the gate, and of up's absolute value; or None
    alpha,  # see `activate`; or None
    n_start,  # the program's first output
    N: tl.constexpr,
    GATED: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_N: tl.constexpr,  # outputs per program
):
    """Store acc^T: a share's partial sums unchanged, or full sums after the epilogue."""
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
            # y's columns are TILE_N of the gate, then TILE_N of the up projection. tl.split needs the two as the last
            # axis: [BLOCK_M, 2, TILE_N] becomes [BLOCK_M, TILE_N, 2].
            halves = tl.permute(tl.reshape(y, (BLOCK_M, 2, TILE_N)), (0, 2, 1))
            y, up = tl.split(halves)
        offs_m = offs_m.to(tl.int64)[:, None]
        epilogue(y, up, bias_ptr, residual_ptr, y_ptr, offs_m, offs_n, mask, limit, N, GATED, alpha)


@triton.jit
def _rows_of_group(
    ends_ptr,  # int32 [E]
    sorted_row,  # the row that this program was launched for
    offs_m,  # [BLOCK_M], relative to the program's first row
    M,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Return the sorted rows of this program, one past their group's last row, and the group. Without rows, all are M,
    the number of sorted rows.

    Every BLOCK_M-th row of a group starts a tile; the programs of the other rows have none.
    """
    INT32_MAX: tl.constexpr = 2**31 - 1
    offs_e = tl.arange(0, BLOCK_E)
    # The last group is open-ended, so every row belongs to a group.
    ends = tl.load(ends_ptr + offs_e, mask=offs_e < GROUPS - 1, other=INT32_MAX)
    is_before = ends <= sorted_row
    group = tl.sum(is_before.to(tl.int32), 0)
    m_start = tl.max(tl.where(is_before, ends, 0), 0)
    m_end = tl.minimum(tl.min(tl.where(is_before, INT32_MAX, ends), 0), M)
    return tl.where((sorted_row - m_start) % BLOCK_M == 0, sorted_row + offs_m, M), m_end, group
