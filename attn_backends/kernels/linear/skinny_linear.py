"""Linear layers over few rows, fused with the operations around them: one kernel each, bound by reading the weight.

Legend: M rows, K inputs, N outputs. Computation is in fp32 between the loads and the store. A program owns BLOCK_N
outputs (with GATED their gate rows and up rows) of BLOCK_M rows and walks all of K, so the order of summation does not
depend on scheduling.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from attn_backends.kernels.add_rms_norm import add_rms_norm
from attn_backends.kernels.linear.batch_invariance import is_batch_invariant
from attn_backends.kernels.linear.batch_invariant_linear import batch_invariant_linear
from attn_backends.kernels.linear.fp8_weight import Weight, is_scaled, operands, widened
from attn_backends.kernels.linear.product_kind import may_launch
from attn_backends.kernels.linear.skinny_tiling import MAX_ROWS, Tiling, tile_of
from attn_backends.kernels.linear.swiglu import activated
from builders.errors import BatchError, require
from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, stored_as, tl, triton

MAX_WIDE_ROWS = 64
"""Rows of a wide linear, whose weight is small enough to be read again for every _TOGETHER of them."""

_TOGETHER = 4
"""The most rows per program: more would exhaust its registers."""

_EVICT_ABOVE_BYTES = 32 << 20
"""A larger weight is evicted first from the L2 cache, which would not hold it until the next step anyway."""


def skinny_linear(x: torch.Tensor, weight: Weight, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight^T, plus residual [M, N] if given; [M, N]. x: [M, K]; weight: [N, K], contiguous, of x's dtype
    or in 8 bits.

    Raises BatchError for more than MAX_ROWS rows and for shapes or dtypes that do not fit, before any launch.
    """
    values, scale = operands(weight)
    return _skinny_linear(*SkinnyLinear(x, values, residual=residual, scale=scale).checked())[1]


def skinny_gated_linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Return silu(gate) * up of x @ weight^T, for weight [2 N, K], gate above up; otherwise as `skinny_linear`."""
    values, scale = operands(weight)
    return _skinny_linear(*SkinnyLinear(x, values, gated=True, scale=scale).checked())[1]


def norm_linear(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    norm: torch.Tensor,
    eps: float,
    weight: Weight,
    gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + delta (x if delta is None), [M, K], and its RMS norm by `norm` [K] and eps @ weight^T, [M, N].

    gated: weight [2 N, K] holds gate above up, and the second result is silu(gate) * up; otherwise weight is [N, K]. x
    + delta is rounded to x's dtype, its norm is not. Raises as `skinny_linear` does.
    """
    values, scale = operands(weight)
    arguments = SkinnyLinear(x, values, delta=delta, norm=norm, eps=eps, gated=gated, scale=scale)
    total, out = _skinny_linear(*arguments.checked())
    return (x if delta is None else total), out


def embed_linear(
    token_ids: torch.Tensor, embedding: torch.Tensor, hidden: torch.Tensor, weight: Weight
) -> torch.Tensor:
    """Return (embedding[token_ids] | hidden) @ weight^T, [M, N].

    token_ids int64 [T], embedding [V, H], hidden [T, H], weight [N, 2 H]. Raises as `skinny_linear` does.
    """
    values, scale = operands(weight)
    return _skinny_linear(*SkinnyLinear(hidden, values, token_ids, embedding, scale=scale).checked())[1]


def wide_linear(x: torch.Tensor, weight: torch.Tensor, *, norm_eps: float | None = None) -> torch.Tensor:
    """Return x @ weight^T in fp32, [M, N], for x [M, K] of any float dtype and weight fp32 [N, K].

    For a router, where rounding to a narrower dtype would swap nearly equal scores, and for the coefficients of
    hyper-connections. norm_eps: first divide x by its root mean square, with norm_eps added to the mean. Takes any
    number of rows; few rows use the kernel. Raises BatchError for shapes or dtypes that do not fit, before any launch.
    """
    require(
        x.dim() == 2 and x.is_floating_point() and weight.dtype == torch.float32 and weight.shape[1:] == x.shape[1:],
        f"a wide linear takes float x [M, K] and float32 weight [N, K], got x {x.dtype} {list(x.shape)} and weight "
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


def embedded(token_ids: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    """Return embedding[token_ids], with a row of 0 for an id outside the vocabulary, as the kernels that embed do."""
    known = (token_ids >= 0) & (token_ids < len(embedding))
    return torch.where(known[..., None], F.embedding(token_ids * known, embedding), 0)


def _like(tensor: torch.Tensor | None, x: torch.Tensor, *shape: int) -> bool:
    """Whether an optional tensor has this shape and x's dtype and is contiguous."""
    return tensor is None or (tensor.shape == shape and tensor.dtype == x.dtype and tensor.is_contiguous())


class SkinnyLinear(NamedTuple):
    """Rows x, the weight, and the operations fused around their product; None for an absent one.

    x          float [M, K], or [M, K / 2] with an embedding; contiguous along K
    weight     float [N, K], with a gate [2 N, K]
    token_ids  int64 [T], with an embedding
    embedding  [V, K / 2] in x's dtype: the row of each token is prepended to x
    delta      like x, contiguous: added to x
    norm       float [K]: the weight of the RMS norm
    residual   [M, N] in x's dtype: added to the product
    eps        of the RMS norm; None: no norm
    gated      the product holds gate above up, and becomes silu(gate) * up
    scale      fp32 [N], with a gate [2 N]: of a weight in float8_e4m3fn

    Returns x + delta (empty without a delta) and the result [M, N] in the weight's dtype, or in x's with a scale.
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
    scale: torch.Tensor | None = None

    @property
    def outputs(self) -> int:
        """N."""
        return self.weight.shape[0] // 2 if self.gated else self.weight.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """The result's dtype."""
        return self.weight.dtype if self.scale is None else self.x.dtype

    def checked(self) -> SkinnyLinear:
        """Return self. Raises BatchError for more than MAX_ROWS rows and for shapes or dtypes that do not fit."""
        x, weight, token_ids, embedding = self[:4]
        rows, inputs = x.shape[0], x.shape[1] * (1 if embedding is None else 2)
        require(
            0 < rows <= MAX_ROWS,
            f"a skinny linear takes 1 to {MAX_ROWS} rows, got {rows}. Choose the kernel with product_kind.",
        )
        if not (
            weight.shape[1] == inputs
            and not (self.gated and weight.shape[0] % 2)
            and weight.is_contiguous()
            and is_scaled(weight, self.scale)
            and (self.scale is not None or weight.dtype == x.dtype)
            and x.stride(1) == 1
            and (token_ids is None or (token_ids.shape == (rows,) and token_ids.dtype == torch.int64))
            and (embedding is None or _like(embedding, x, embedding.shape[0], x.shape[1]))
            and _like(self.delta, x, rows, inputs)
            and (self.norm is None or self.norm.shape == (inputs,))
            and _like(self.residual, x, rows, self.outputs)
            and all(each is None or each.is_contiguous() for each in (token_ids, self.norm))
        ):
            tensors = {name: value for name, value in self._asdict().items() if isinstance(value, torch.Tensor)}
            given = ", ".join(f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors.items())
            raise BatchError(
                f"a skinny linear of {inputs} inputs and {self.outputs} outputs needs contiguous tensors of these "
                f"sizes and one dtype, or an 8-bit weight with its scale, got {given}. See its docstring for shapes."
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
        out = F.linear(wide, widened(self.weight, self.scale))
        if self.gated:
            out = activated(out)
        if self.residual is not None:
            out = self.residual.float() + out
        return total, out.to(self.dtype)

    def fake(self) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.x.new_empty(0 if self.delta is None else self.x.shape)
        return total, self.weight.new_empty(self.x.shape[0], self.outputs, dtype=self.dtype)

    def launch(self, tile: Tiling | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """tile: the kernel's tiling; None: `tile_of`'s."""
        x, weight, (total, out), outputs = self.x, self.weight, self.fake(), self.outputs
        rows, inputs, stored = x.shape[0], weight.shape[1], stored_as(out)
        together = min(rows, _TOGETHER)
        tile = tile or tile_of(together, outputs, inputs, gated=self.gated, itemsize=weight.element_size())
        matvec_kernel[(cdiv(outputs, tile.block_n), cdiv(rows, together))](
            x_ptr=self.x,
            w_ptr=self.weight,
            scale_ptr=self.scale,
            token_ids_ptr=self.token_ids,
            embedding_ptr=self.embedding,
            delta_ptr=self.delta,
            norm_ptr=self.norm,
            residual_ptr=self.residual,
            total_ptr=total,
            y_ptr=stored,
            M=rows,
            vocab_size=0 if self.embedding is None else self.embedding.shape[0],
            stride_xm=x.stride(0),
            eps=self.eps,
            N=outputs,
            K=inputs,
            GATED=self.gated,
            EVICTION="evict_first" if weight.nbytes > _EVICT_ABOVE_BYTES else "",
            BLOCK_M=next_power_of_2(together),
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            STAGES=tile.stages,
            num_warps=tile.num_warps,
            **dependent_launch(x.device),
        )
        return total, stored.to(out.dtype)


_skinny_linear = define_op("attn_backends::skinny_linear", SkinnyLinear)


@triton.jit
def matvec_kernel(
    x_ptr,  # [M, K]; with an embedding [M, K / 2]
    w_ptr,  # [N, K], with a gate [2 N, K]
    scale_ptr,  # fp32 [N], with a gate [2 N], of w; or None
    token_ids_ptr,  # int64 [T], or None
    embedding_ptr,  # [V, K / 2], or None
    delta_ptr,  # [M, K], or None
    norm_ptr,  # [K], or None
    residual_ptr,  # [M, N], or None
    total_ptr,  # out: [M, K]; empty without a delta
    y_ptr,  # out: [M, N]
    M,
    vocab_size,  # V; 0 without an embedding
    stride_xm,  # between rows
    eps,  # of the norm; None: no norm
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    EVICTION: tl.constexpr,  # eviction policy of the weight's loads
    BLOCK_M: tl.constexpr,  # rows per program
    BLOCK_N: tl.constexpr,  # outputs per program
    BLOCK_K: tl.constexpr,  # inputs per iteration
    STAGES: tl.constexpr,  # tiles in flight
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """y = epilogue(norm(x) @ w^T * scale). A program has BLOCK_N outputs of BLOCK_M rows.

    Grid [tiles of N, tiles of M].

    Multiplies in fp32 and sums over K at the end: with so few rows, a tensor core would run nearly empty.
    """
    await_previous(PDL)
    # 1. Every tile has three axes, M, N and K, so loads have the same layout as the products.
    offs_m = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None, None]
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_ptrs = w_ptr + offs_n[None, :, None].to(tl.int64) * K
    token = tl.load(token_ids_ptr + offs_m, mask=offs_m < M, other=0) if token_ids_ptr is not None else offs_m * 0
    acc = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K], tl.float32)
    acc_up = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K], tl.float32)
    acc_sq = tl.zeros([BLOCK_M, 1, BLOCK_K], tl.float32)
    # 2. Products and squares, in blocks of BLOCK_K inputs
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        offs_k = k + tl.arange(0, BLOCK_K)[None, None, :]
        mask = (offs_n[None, :, None] < N) & (offs_k < K)
        w = tl.load(w_ptrs + offs_k, mask=mask, other=0.0, eviction_policy=EVICTION)
        x = _load_x(x_ptr, stride_xm, embedding_ptr, token, vocab_size, delta_ptr, total_ptr, offs_m, offs_k, M, K)
        if eps is not None:
            acc_sq += x * x
        if norm_ptr is not None:
            x *= tl.load(norm_ptr + offs_k, mask=offs_k < K, other=0.0).to(tl.float32)
        acc += x * w.to(tl.float32)
        if GATED:
            w_up = tl.load(w_ptrs + N * K + offs_k, mask=mask, other=0.0, eviction_policy=EVICTION)
            acc_up += x * w_up.to(tl.float32)
    # 3. Their sums over K, and the scale
    y, up, sum_sq = tl.sum(acc, 2), tl.sum(acc_up, 2), tl.sum(acc_sq, 2)
    if scale_ptr is not None:
        y *= tl.load(scale_ptr + offs_n, mask=offs_n < N, other=0.0)[None, :]
        if GATED:
            up *= tl.load(scale_ptr + N + offs_n, mask=offs_n < N, other=0.0)[None, :]
    # 4. The norm, the gate and the residual, and the store
    if eps is not None:
        # The norm's factor is constant over a row, so it moves out of the sum and x is read once instead of twice.
        rstd = tl.rsqrt(sum_sq / K + eps)
        y *= rstd
        up *= rstd
    if GATED:
        y = y / (1.0 + tl.exp(-y)) * up
    offs_m = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    y_offs, mask = offs_m * N + offs_n[None, :], (offs_m < M) & (offs_n < N)[None, :]
    if residual_ptr is not None:
        y += tl.load(residual_ptr + y_offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + y_offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_x(
    x_ptr,  # [M, K]; with an embedding [M, K / 2]
    stride_xm,
    embedding_ptr,  # [V, K / 2], or None
    token,
    vocab_size,  # V
    delta_ptr,  # [M, K], or None
    total_ptr,  # out: [M, K]
    offs_m,
    offs_k,
    M,
    K: tl.constexpr,
):
    """Load the rows' values at these columns, in fp32: x, x + delta, or embedding | x."""
    mask = (offs_m < M) & (offs_k < K)
    if embedding_ptr is not None:
        HALF_K: tl.constexpr = K // 2
        # An id outside the vocabulary must not read outside the table.
        is_known = mask & (offs_k < HALF_K) & (token >= 0) & (token < vocab_size)
        embedded = tl.load(embedding_ptr + token * HALF_K + offs_k, mask=is_known, other=0.0)
        hidden = tl.load(x_ptr + offs_m * stride_xm + offs_k - HALF_K, mask=mask & (offs_k >= HALF_K), other=0.0)
        x = embedded.to(tl.float32) + hidden.to(tl.float32)
    else:
        x = tl.load(x_ptr + offs_m * stride_xm + offs_k, mask=mask, other=0.0).to(tl.float32)
        if delta_ptr is not None:
            x += tl.load(delta_ptr + offs_m * K + offs_k, mask=mask, other=0.0).to(tl.float32)
            # The residual stream is rounded to its dtype before the norm, as separate kernels would do.
            narrow = x.to(x_ptr.dtype.element_ty)
            tl.store(total_ptr + offs_m * K + offs_k, narrow, mask=mask & (tl.program_id(0) == 0))
            x = narrow.to(tl.float32)
    return x
