"""The Triton kernel of sparse attention; sparse_attention.py holds its contract and the shape legend.

What it costs is the latency of a chain: slots, latents, dot, softmax, dot, store. So the list of a window is one block,
whose loads are all in flight at once and whose latents go to shared memory once, for both dots.
"""

from __future__ import annotations

from attn_backends.kernels import fp8_ds_mla
from builders.kernels.triton_runtime import await_previous, tl, triton

NOPE = tl.constexpr(fp8_ds_mla.NOPE)
TILE = tl.constexpr(fp8_ds_mla.TILE)
DATA_BYTES = tl.constexpr(fp8_ds_mla.DATA_BYTES)
SCALE_BYTES = tl.constexpr(fp8_ds_mla.SCALE_BYTES)


@triton.jit
def sparse_attention_kernel(
    query, cache, indices, lens, sinks, out, scale, width, num_slots, q_token_stride, q_head_stride, list_stride,
    page_stride, token_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, FP8_DS_MLA: tl.constexpr, SINKS: tl.constexpr,
    ONE_BLOCK: tl.constexpr, TOKENS_FIRST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    FP32_DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, DIM)
    in_head = head < HEADS
    q = tl.load(
        query + token * q_token_stride + head.to(tl.int64)[:, None] * q_head_stride + dim[None, :],
        mask=in_head[:, None],
        other=0.0,
    )
    if FP32_DOT:
        q = q.to(tl.float32)
    # A sink is a first token that has a weight and no value. Where there is none, it lies so far below every score that
    # its weight fades to nothing, and an empty list needs no care. One of +inf lies as far above: inf - inf is NaN.
    peak = tl.full((BLOCK_M,), -1e30, tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=in_head, other=float("-inf"))
        peak = tl.where(sink > 1e30, 1e30, tl.maximum(sink * 1.4426950408889634, peak))
    total = tl.full((BLOCK_M,), 1.0, tl.float32)
    acc = tl.zeros((BLOCK_M, DIM), tl.float32)
    length = tl.load(lens + token)
    indices += token * list_stride
    if ONE_BLOCK:
        k, listed = _block(
            cache, indices, 0, length, width, num_slots, page_stride, token_stride, DIM, PAGE_SIZE, FP8_DS_MLA,
            BLOCK_N, FP32_DOT,
        )  # fmt: skip
        if TOKENS_FIRST:
            # A loop of at most one iteration: a dot's first operand stays in shared memory if a loop carries it, and is
            # copied to registers, which run out, if it was just computed.
            for _ in tl.range(0, tl.minimum(length, 1)):
                peak, total, _, acc = _attend(q, k, listed, length > 0, scale, peak, total, True)
                k = tl.zeros_like(k)
        else:
            peak, total, _, acc = _attend(q, k, listed, length > 0, scale, peak, total, False)
    else:
        for start in tl.range(0, length, BLOCK_N):
            k, listed = _block(
                cache, indices, start, length, width, num_slots, page_stride, token_stride, DIM, PAGE_SIZE, FP8_DS_MLA,
                BLOCK_N, FP32_DOT,
            )  # fmt: skip
            peak, total, fade, update = _attend(q, k, listed, length > 0, scale, peak, total, False)
            acc = acc * fade[:, None] + update
    acc = acc * (1.0 / total)[:, None]
    at = out + (token * HEADS + head)[:, None] * DIM + dim[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=in_head[:, None])


@triton.jit
def _attend(q, k, listed, live, scale, peak, total, TOKENS_FIRST: tl.constexpr):
    """A block's part of the running softmax: the new peak and total, what older sums fade by, and the block's sum.

    q [M, D], k [N, D]. On Hopper a dot's first operand has at least 64 rows: the tokens of the block where few heads
    share a program, the heads where they are many.
    """
    if TOKENS_FIRST:
        scores = tl.trans(tl.dot(k, tl.trans(q), input_precision="ieee"))
    else:
        scores = tl.zeros((q.shape[0], k.shape[0]), tl.float32)
        # The branch keeps the compiler from seeing that this dot feeds the next one. It would then give every warp
        # whole rows, and with 64 rows for eight warps, compute all scores twice.
        if live:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    new_peak = tl.maximum(peak, tl.max(tl.where(listed[None, :], scores * scale, float("-inf")), 1))
    # Fused, so that no score is rounded after scaling: large ones would lose more than fp32 should.
    weights = tl.exp2(tl.fma(scores, scale, -new_peak[:, None]))
    weights = tl.where(listed[None, :], weights, 0.0)
    fade = tl.exp2(peak - new_peak)
    total = total * fade + tl.sum(weights, 1)
    weights = weights.to(k.dtype)
    if TOKENS_FIRST:
        update = tl.trans(tl.dot(tl.trans(k), tl.trans(weights), input_precision="ieee"))
    else:
        update = tl.dot(weights, k, input_precision="ieee")
    return new_peak, total, fade, update


@triton.jit
def _block(
    cache, indices, start, length, width, num_slots, page_stride, token_stride,
    DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, FP8_DS_MLA: tl.constexpr, BLOCK_N: tl.constexpr, FP32_DOT: tl.constexpr,
):  # fmt: skip
    """The latents [N, D] of a list's entries from `start` on, 0 where nothing is listed, and which are listed [N]."""
    entry = start + tl.arange(0, BLOCK_N)
    # Masked by the width alone, so that the slots need not wait for the length.
    slot = tl.load(indices + entry, mask=entry < width, other=-1)
    # Unsigned, a negative slot is beyond every pool, and a division by a power of two is a shift.
    slot = slot.to(tl.uint32)
    listed = (entry < length) & (slot < num_slots)
    page = cache + (slot // PAGE_SIZE).to(tl.int64) * page_stride
    offset = (slot % PAGE_SIZE).to(tl.int64)
    if FP8_DS_MLA:
        k = _fp8_ds_mla_latents(page, offset, listed, PAGE_SIZE, BLOCK_N)
    else:
        # In tiles, so that a thread holds many tiles of few rows and computes few addresses.
        tile = (page + offset * token_stride)[:, None] + (tl.arange(0, DIM // TILE) * TILE)[None, :]
        k = tl.load(tile[:, :, None] + tl.arange(0, TILE)[None, None, :], mask=listed[:, None, None], other=0.0)
        k = tl.reshape(k, (BLOCK_N, DIM))
    if FP32_DOT:
        k = k.to(tl.float32)
    return k, listed


@triton.jit
def _fp8_ds_mla_latents(page, offset, listed, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Latents bfloat16 [N, LATENT] from fp8_ds_mla: tiles of e4m3, each times a power of two, then one of bf16."""
    tile = tl.arange(0, 8)
    lane = tl.arange(0, TILE)
    rotated = (tile * TILE >= NOPE)[None, :, None]
    exponents = (page + PAGE_SIZE * DATA_BYTES + offset * SCALE_BYTES)[:, None] + tile[None, :]
    exponents = tl.load(exponents, mask=listed[:, None], other=0)
    powers = (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    data = page + offset * DATA_BYTES
    listed = listed[:, None, None]
    nope = (data[:, None] + (tile * TILE)[None, :])[:, :, None] + lane[None, None, :]
    nope = tl.load(nope, mask=listed & ~rotated, other=0)
    nope = nope.to(tl.float8e4nv, bitcast=True).to(tl.float32) * powers[:, :, None]
    rope = (data + NOPE).to(tl.pointer_type(tl.bfloat16))[:, None] + (tile * TILE - NOPE)[None, :]
    rope = tl.load(rope[:, :, None] + lane[None, None, :], mask=listed & rotated, other=0.0)
    return tl.reshape(tl.where(rotated, rope, nope.to(tl.bfloat16)), (BLOCK_N, 8 * TILE))
