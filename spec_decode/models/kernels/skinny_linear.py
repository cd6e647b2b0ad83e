"""Linear layers over few rows, with what comes before and after them: one kernel each, bound by reading the weight.

Legend: T rows, K inputs, N outputs. All work of a row happens in fp32 between the loads and the store. A program owns
BLOCK_N outputs (with GATED their gate rows and their up rows) of BLOCK_T rows and walks all of K, so that a result has
one order of summation whatever the device does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from builders.errors import BatchError, require
from builders.kernels.op import define_op
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.models.kernels.add_rms_norm import add_rms_norm
from spec_decode.models.kernels.batch_invariance import is_batch_invariant
from spec_decode.models.kernels.batch_invariant_linear import batch_invariant_linear
from spec_decode.models.kernels.embed_concat import embedded
from spec_decode.models.kernels.product_kind import may_launch
from spec_decode.models.kernels.skinny_tiling import MAX_ROWS, Tiling, power_of_two, tile_of
from spec_decode.models.kernels.stored_as import stored_as

MAX_WIDE_ROWS = 64
"""Those of a wide linear, whose weight is small enough to be read again for every _TOGETHER of them."""

_TOGETHER = 4
"""Rows of one program at most: more would not leave it the registers."""

_KEPT_IN_CACHE = 32 << 20
"""Bytes of a weight above which no L2 cache would hold it until the next step: it is read to be dropped first."""


def skinny_linear(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight^T, plus residual [T, N] where there is one; x [T, K], weight [N, K] contiguous, of one dtype; [T, N].

    Raises BatchError for more than MAX_ROWS rows and for shapes or dtypes that do not fit, with nothing run.
    """
    return _skinny_linear(*SkinnyLinear(x, weight, residual=residual).checked())[1]


def skinny_gated_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of x @ weight^T, weight [2 N, K], gate above up; else as `skinny_linear`."""
    return _skinny_linear(*SkinnyLinear(x, weight, gated=True).checked())[1]


def norm_linear(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + delta (x where there is none), [T, K], and its RMS norm by `norm` [K] and eps, @ weight^T.

    gated: weight [2 N, K] holds gate above up, and the second result is silu(gate) * up; else it is [N, K]. The result
    is [T, N]. x + delta is rounded to x's dtype, its norm is not. Raises as `skinny_linear` does.
    """
    total, out = _skinny_linear(*SkinnyLinear(x, weight, delta=delta, norm=norm, eps=eps, gated=gated).checked())
    return (x if delta is None else total), out


def embed_linear(
    token_ids: torch.Tensor, embedding: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """(embedding[token_ids] | hidden) @ weight^T, [T, N].

    token_ids int64 [T], embedding [V, H], hidden [T, H], weight [N, 2 H]. Raises as `skinny_linear` does.
    """
    return _skinny_linear(*SkinnyLinear(hidden, weight, token_ids, embedding).checked())[1]


def wide_linear(x: torch.Tensor, weight: torch.Tensor, *, norm_eps: float | None = None) -> torch.Tensor:
    """x @ weight^T in fp32 whatever x has: x [T, K] of any float dtype, weight fp32 [N, K]; fp32 [T, N].

    For a router, whose almost equal scores would change places with the rounding of a narrower product, and for the
    shares of hyper-connections. norm_eps: x is first divided by its root mean square, the mean plus norm_eps. Any
    number of rows, few of them by the kernel. Raises BatchError for shapes or dtypes that do not fit, with nothing run.
    """
    require(
        x.dim() == 2 and x.is_floating_point() and weight.dtype == torch.float32 and weight.shape[1:] == x.shape[1:],
        f"a wide linear takes floats x [T, K] and a weight float32 [N, K], got x {x.dtype} {list(x.shape)} and weight "
        f"{weight.dtype} {list(weight.shape)}. Keep the weight in float32.",
    )
    if is_batch_invariant():
        ones = weight.new_ones(weight.shape[1])
        wide = x if norm_eps is None else add_rms_norm(x.float(), None, ones, norm_eps)[1]
        return batch_invariant_linear(wide[:, None], weight[None])[:, 0]
    arguments = SkinnyLinear(x, weight, eps=norm_eps)
    few = 0 < x.shape[0] <= MAX_WIDE_ROWS and may_launch(x.device) and weight.is_contiguous() and x.stride(1) == 1
    with torch.autocast(x.device.type, enabled=False):
        out: torch.Tensor = (_skinny_linear(*arguments) if few else arguments.reference())[1]
    return out


def _like(tensor: torch.Tensor | None, x: torch.Tensor, *shape: int) -> bool:
    """Whether a tensor, where there is one, is of this shape, contiguous and of x's dtype."""
    return tensor is None or (tensor.shape == shape and tensor.dtype == x.dtype and tensor.is_contiguous())


class SkinnyLinear(NamedTuple):
    """Rows x with what comes before and after their product with a weight; None for what a form does without.

    x          float [T, K], or [T, K / 2] beside an embedding; adjacent along K
    weight     float [N, K], with a gate [2 N, K]
    token_ids  int64 [T], with an embedding
    embedding  as x, [V, K / 2]: that of each row's token comes before x
    delta      as x, contiguous: is added to x
    norm       float [K]: the weight of the RMS norm
    residual   as x, [T, N]: is added to the product
    eps        of the RMS norm; None: no norm
    gated      the product is a gate above up, and becomes silu(gate) * up

    Returns x + delta (empty without a delta) and the result [T, N] in the weight's dtype.
    """

    x: torch.Tensor
    weight: torch.Tensor
    token_ids: torch.Tensor | None = None
    embedding: torch.Tensor | None = None
    delta: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    eps: float | None = None
    gated: bool = False

    @property
    def outputs(self) -> int:
        """N."""
        return self.weight.shape[0] // 2 if self.gated else self.weight.shape[0]

    def checked(self) -> SkinnyLinear:
        """These. Raises BatchError for more than MAX_ROWS rows and for shapes or dtypes that do not fit."""
        x, weight, token_ids, embedding = self[:4]
        rows, inputs = x.shape[0], x.shape[1] * (1 if embedding is None else 2)
        require(
            0 < rows <= MAX_ROWS,
            f"a skinny linear takes 1 to {MAX_ROWS} rows, got {rows}. Ask product_kind, and use "
            "torch's linear where it says so.",
        )
        if not (
            weight.shape[1] == inputs
            and weight.is_contiguous()
            and weight.dtype == x.dtype
            and x.stride(1) == 1
            and (token_ids is None or (token_ids.shape == (rows,) and token_ids.dtype == torch.int64))
            and (embedding is None or _like(embedding, x, embedding.shape[0], x.shape[1]))
            and _like(self.delta, x, rows, inputs)
            and (self.norm is None or self.norm.shape == (inputs,))
            and _like(self.residual, x, rows, self.outputs)
        ):
            tensors = {name: value for name, value in self._asdict().items() if isinstance(value, torch.Tensor)}
            found = ", ".join(f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors.items())
            raise BatchError(
                f"a skinny linear of {inputs} inputs and {self.outputs} outputs needs contiguous tensors of one dtype "
                f"and of these sizes, got {found}. See its docstring for the shapes."
            )
        return self

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x
        if self.token_ids is not None and self.embedding is not None:
            x = torch.cat([embedded(self.token_ids, self.embedding), x], -1)
        total = x.new_empty(0) if self.delta is None else x + self.delta
        wide = (x if self.delta is None else total).float()
        if self.eps is not None:
            wide = F.rms_norm(wide, wide.shape[1:], None if self.norm is None else self.norm.float(), self.eps)
        out = F.linear(wide, self.weight.float())
        if self.gated:
            gate, up = out.chunk(2, -1)
            out = F.silu(gate) * up
        if self.residual is not None:
            out = self.residual.float() + out
        return total, out.to(self.weight.dtype)

    def fake(self) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.x.new_empty(0 if self.delta is None else self.x.shape)
        return total, self.weight.new_empty(self.x.shape[0], self.outputs)

    def launch(self, tile: Tiling | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """tile: how the kernel is cut; None: as `tile_of` does."""
        x, weight, (total, out), outputs = self.x, self.weight, self.fake(), self.outputs
        rows, inputs, stored = x.shape[0], weight.shape[1], stored_as(out)
        together = min(rows, _TOGETHER)
        tile = tile or tile_of(together, outputs, inputs, gated=self.gated, itemsize=weight.element_size())
        matvec_kernel[(triton.cdiv(outputs, tile.block_n), triton.cdiv(rows, together))](
            *self[:7],
            total,
            stored,
            rows,
            0 if self.embedding is None else self.embedding.shape[0],
            x.stride(0),
            self.eps,
            N=outputs,
            K=inputs,
            GATED=self.gated,
            EVICTION="evict_first" if weight.nbytes > _KEPT_IN_CACHE else "",
            BLOCK_T=power_of_two(together),
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            STAGES=tile.stages,
            num_warps=tile.num_warps,
            **dependent_launch(x.device),
        )
        return total, stored.to(out.dtype)


_skinny_linear = define_op("spec_decode::skinny_linear", SkinnyLinear)


@triton.jit
def matvec_kernel(
    x,  # [T, K]; with an embedding [T, K / 2]
    weight,  # [N, K], with a gate [2 N, K]
    token_ids,  # int64 [T], or None
    embedding,  # [V, K / 2], or None
    delta,  # [T, K], or None
    norm,  # [K], or None
    residual,  # [T, N], or None
    total,  # out: [T, K]; empty without a delta
    out,  # out: [T, N]
    rows,  # T
    vocab,  # V; 0 without an embedding
    x_stride,  # of a row
    eps,  # of the norm; None: no norm
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    EVICTION: tl.constexpr,  # the eviction policy of the weight's loads
    BLOCK_T: tl.constexpr,  # rows of a program
    BLOCK_N: tl.constexpr,  # outputs of a program
    BLOCK_K: tl.constexpr,  # inputs multiplied at a time
    STAGES: tl.constexpr,  # tiles in flight
    PDL: tl.constexpr,
):
    """BLOCK_N outputs of BLOCK_T rows; its grid is [tiles of outputs, tiles of rows].

    Products in fp32, summed over K at the end: for so few rows that a tensor core would run nearly empty.
    """
    await_previous(PDL)
    # Every tile has three axes, T, N and K, so that no load needs another layout than the products.
    row = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None, None]
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows_of_weight = weight + output[None, :, None].to(tl.int64) * K
    token = _token(token_ids, row, rows)
    sums = tl.zeros([BLOCK_T, BLOCK_N, BLOCK_K], tl.float32)
    up_sums = tl.zeros([BLOCK_T, BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_T, 1, BLOCK_K], tl.float32)
    # Products and squares, BLOCK_K inputs at a time
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK_K)[None, None, :]
        owned = (output[None, :, None] < N) & (column < K)
        factor = tl.load(rows_of_weight + column, mask=owned, other=0.0, eviction_policy=EVICTION)
        wide = _input(x, x_stride, embedding, token, vocab, delta, total, row, column, rows, K)
        if eps is not None:
            squares += wide * wide
        if norm is not None:
            wide *= tl.load(norm + column, mask=column < K, other=0.0).to(tl.float32)
        sums += wide * factor.to(tl.float32)
        if GATED:
            up = tl.load(rows_of_weight + N * K + column, mask=owned, other=0.0, eviction_policy=EVICTION)
            up_sums += wide * up.to(tl.float32)
    # Their sums over K, what comes after the product, and the store
    result, up_result, square = tl.sum(sums, 2), tl.sum(up_sums, 2), tl.sum(squares, 2)
    row = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    _finish(result, up_result, square, eps, residual, out, row, output[None, :], rows, N, K, GATED)


@triton.jit
def _token(
    token_ids,  # int64 [T], or None
    row,
    rows,  # T
):
    """The token of each row, shaped as row; 0 where there are no tokens."""
    return tl.load(token_ids + row, mask=row < rows, other=0) if token_ids is not None else row * 0


@triton.jit
def _input(
    x,  # [T, K]; with an embedding [T, K / 2]
    x_stride,
    embedding,  # [V, K / 2], or None
    token,
    vocab,  # V
    delta,  # [T, K], or None
    total,  # out: [T, K]
    row,
    column,
    rows,  # T
    K: tl.constexpr,
):
    """What the rows hold at the columns, fp32: x, x + delta, or the token's embedding beside x."""
    inside = (row < rows) & (column < K)
    if embedding is not None:
        width: tl.constexpr = K // 2
        # An id outside the vocabulary must not lead the read out of the table.
        known = inside & (column < width) & (token >= 0) & (token < vocab)
        embedded = tl.load(embedding + token * width + column, mask=known, other=0.0)
        beside = tl.load(x + row * x_stride + column - width, mask=inside & (column >= width), other=0.0)
        wide = embedded.to(tl.float32) + beside.to(tl.float32)
    else:
        wide = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        if delta is not None:
            wide += tl.load(delta + row * K + column, mask=inside, other=0.0).to(tl.float32)
            # The residual stream is rounded to its dtype before the norm, as separate kernels would leave it.
            narrow = wide.to(x.dtype.element_ty)
            tl.store(total + row * K + column, narrow, mask=inside & (tl.program_id(0) == 0))
            wide = narrow.to(tl.float32)
    return wide


@triton.jit
def _finish(
    result,  # fp32 [BLOCK_T, BLOCK_N]
    up,  # fp32 [BLOCK_T, BLOCK_N], of the up projection
    square,  # fp32 [BLOCK_T, 1], a row's sum of squares
    eps,  # of the norm; None: no norm
    residual,  # [T, N], or None
    out,  # out: [T, N]
    row,  # [BLOCK_T, 1]
    output,  # [1, BLOCK_N]
    rows,  # T
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
):
    """Norm the sums, gate or add, and store."""
    if eps is not None:
        # A row's scale is the same for all of its products: taken out of the sum, x is read once, not twice.
        scale = tl.rsqrt(square / K + eps)
        result *= scale
        up *= scale
    if GATED:
        result = result / (1.0 + tl.exp(-result)) * up
    inside = (row < rows) & (output < N)
    if residual is not None:
        result += tl.load(residual + row * N + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + output, result.to(out.dtype.element_ty), mask=inside)
