"""Attention over lists of latents (DeepSeek-V4's sparse MLA): every query token names the cache slots it attends to.

One latent per token is both key and value. Shape legend: T query tokens, H heads, D latent dim, M heads of a program,
N list entries of a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from attn_backends.kernels import packed_latent
from attn_backends.kernels.sparse_attention_kernels import sparse_attention_kernel
from builders.errors import require, require_tensor
from builders.kernels.op_by_schema import define_op_by_schema
from builders.kernels.triton_runtime import dependent_launch, triton

DIMS = (64, 128, 256, 512)
PROGRAMS_AT_ONCE = 132  # a Hopper GPU's num_sms: a program's tile fills one


@dataclass(frozen=True, slots=True)
class IndexedCache:
    """A paged latent cache and, per query token, the slots in it that the token attends to.

    cache    plain: [pages, page_size, D] in query's dtype, last dim contiguous; or packed: uint8
             [pages, page_bytes(page_size)], D = 512, query bfloat16 (layout in packed_latent.py)
    indices  int32 [T, width], slots page * page_size + offset; an entry of -1 is skipped
    lens     int32 [T], how many entries of its row a token's list has; entries behind them mean nothing
    """

    cache: torch.Tensor
    indices: torch.Tensor
    lens: torch.Tensor
    page_size: int

    @property
    def packed(self) -> bool:
        return self.cache.dtype == torch.uint8


def sparse_attention(
    query: torch.Tensor,
    main: IndexedCache,
    *,
    scale: float,
    sinks: torch.Tensor | None = None,
    extra: IndexedCache | None = None,
) -> torch.Tensor:
    """Attention of query [T, H, D] over the listed latents; returns [T, H, D] in query's dtype.

    With s_j = scale q.k_j over the slots that main and extra list, out = sum e^s_j k_j / (sum e^s_j + e^sink); sinks
    fp32 [H], -inf for a head that has none. A token whose lists are empty comes out as exactly 0. Both caches have the
    same form, plain or packed; their page sizes and widths may differ. Raises BatchError for tensors that do not fit.
    """
    _, heads, dim = query.shape
    require(
        dim in DIMS,
        f"the latent dim must be one of {DIMS}, got {dim}; the kernel's tiles do not fit others, so nothing was run. "
        "Pad the latents and the query with zeros.",
    )
    if sinks is not None:
        require_tensor("sinks", sinks, shape=(heads,), dtype=torch.float32, device=query.device)
    _check("main", main, query)
    if extra is not None:
        _check("extra", extra, query)
        require(
            extra.packed == main.packed,
            f"both caches must have one form, got packed={main.packed} for main and packed={extra.packed} for extra; "
            "one kernel reads both, so nothing was run. Keep them in the same form.",
        )
    out: torch.Tensor = _sparse_attention_op(
        query,
        main.cache,
        main.indices,
        main.lens,
        main.page_size,
        extra.cache if extra else None,
        extra.indices if extra else None,
        extra.lens if extra else None,
        extra.page_size if extra else 0,
        scale,
        sinks,
    )
    return out


def _check(name: str, listed: IndexedCache, query: torch.Tensor) -> None:
    tokens, _, dim = query.shape
    device, cache, page_size = query.device, listed.cache, listed.page_size
    if listed.packed:
        shape: tuple[int | None, ...] = (None, packed_latent.page_bytes(page_size))
        require(
            dim == packed_latent.LATENT and query.dtype == torch.bfloat16,
            f"a packed cache serves bfloat16 queries of dim {packed_latent.LATENT}, got {query.dtype} of dim {dim} "
            f"for {name}; its bytes mean nothing else, so nothing was run. Convert the query or use a plain cache.",
        )
        require_tensor(f"{name}.cache", cache, shape=shape, dtype=torch.uint8, device=device)
    else:
        require_tensor(f"{name}.cache", cache, shape=(None, page_size, dim), dtype=query.dtype, device=device)
    require(
        cache.stride(-1) == 1 and not (listed.packed and cache.stride(0) % 16),
        f"{name}.cache must be contiguous in its last dim, and a packed page must start at a multiple of 16 bytes, got "
        f"strides {cache.stride()}; the kernel would read other bytes, so nothing was run. Lay the cache out again.",
    )
    require_tensor(f"{name}.indices", listed.indices, shape=(tokens, None), dtype=torch.int32, device=device)
    require_tensor(f"{name}.lens", listed.lens, shape=(tokens,), dtype=torch.int32, device=device)
    require(
        listed.indices.stride(1) == 1 and listed.lens.is_contiguous(),
        f"the lists of {name} must be contiguous along a row, and lens as a whole, got strides "
        f"{listed.indices.stride()} and {listed.lens.stride()}; the kernel would read other entries, so nothing was "
        "run. Slice rows only.",
    )


def _sparse_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    lens: torch.Tensor,
    page_size: int,
    extra_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_lens: torch.Tensor | None,
    extra_page_size: int,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    latents, listed = _read(cache, indices, lens, page_size)
    if extra_cache is not None and extra_indices is not None and extra_lens is not None:
        more_latents, more_listed = _read(extra_cache, extra_indices, extra_lens, extra_page_size)
        latents, listed = torch.cat([latents, more_latents], 1), torch.cat([listed, more_listed], 1)
    tokens, heads, _ = query.shape
    scores = torch.matmul(query.float(), latents.transpose(1, 2)) * scale
    scores = scores.masked_fill(~listed[:, None], -math.inf)
    sink = query.new_full((heads,), -math.inf, dtype=torch.float32) if sinks is None else sinks
    weights = torch.cat([scores, sink.view(1, heads, 1).expand(tokens, heads, 1)], -1).softmax(-1)[..., :-1]
    weights = weights.masked_fill(~listed.any(1)[:, None, None], 0.0)
    return torch.matmul(weights, latents).to(query.dtype)


def _read(
    cache: torch.Tensor, indices: torch.Tensor, lens: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The latents a list names, fp32 [T, width, D], 0 where it names none, and where it names one, [T, width]."""
    listed = (torch.arange(indices.shape[1], device=indices.device) < lens[:, None]) & (indices >= 0)
    slots = torch.where(listed, indices, -1)
    if cache.dtype == torch.uint8:
        return packed_latent.unpack(cache, slots.flatten(), page_size).float().unflatten(0, indices.shape), listed
    slots = slots.clamp_min(0).long()
    latents = cache[slots // page_size, slots % page_size].float()
    return latents.masked_fill(~listed[..., None], 0.0), listed


def _shape(query: torch.Tensor, *rest: object) -> torch.Tensor:
    return query.new_empty(query.shape)


def _launch(
    query: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    lens: torch.Tensor,
    page_size: int,
    extra_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_lens: torch.Tensor | None,
    extra_page_size: int,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    tokens, heads, dim = query.shape
    query = query if query.stride(2) == 1 else query.contiguous()
    interpreted = query.device.type == "cpu"
    # The interpreter truncates fp32 to bf16 where the hardware rounds: let torch do that conversion.
    out = torch.empty(query.shape, dtype=torch.float32 if interpreted else query.dtype, device=query.device)
    packed = cache.dtype == torch.uint8
    width = indices.shape[1]
    config = _tile_config(tokens, heads, query.element_size(), width if extra_cache is None else None)
    sparse_attention_kernel[(tokens, triton.cdiv(heads, config["BLOCK_M"]))](
        query,
        out,
        sinks,
        cache,
        indices,
        lens,
        extra_cache,
        extra_indices,
        extra_lens,
        scale * math.log2(math.e),
        width,
        0 if extra_indices is None else extra_indices.shape[1],
        *query.stride()[:2],
        indices.stride(0),
        0 if extra_indices is None else extra_indices.stride(0),
        cache.stride(0),
        0 if extra_cache is None else extra_cache.stride(0),
        cache.stride(-2),
        0 if extra_cache is None else extra_cache.stride(-2),
        HEADS=heads,
        DIM=dim,
        PAGE_SIZE=page_size,
        EXTRA_PAGE_SIZE=extra_page_size,
        PACKED=packed,
        SINKS=sinks is not None,
        EXTRA=extra_cache is not None,
        ONE_BLOCK=width <= config["BLOCK_N"],
        FP32_DOT=interpreted,
        **config,
        **dependent_launch(query.device),
    )
    return out.to(query.dtype)


def _tile_config(tokens: int, heads: int, element_size: int, only_width: int | None) -> dict[str, int]:
    """Heads M and list entries N of a tile, and which of them come first in the dots (tuned on an H200).

    only_width is the width of the only list there is, or None if there are two.
    """
    if element_size == 4:
        return {"BLOCK_M": 16, "BLOCK_N": 16, "TOKENS_FIRST": False, "num_warps": 8, "num_stages": 1}
    if only_width is None or only_width > 128:
        return {"BLOCK_M": 64, "BLOCK_N": 32, "TOKENS_FIRST": False, "num_warps": 8, "num_stages": 1}
    for block_m in (16, 32):
        if heads <= block_m or tokens * triton.cdiv(heads, block_m) <= PROGRAMS_AT_ONCE:
            return {"BLOCK_M": block_m, "BLOCK_N": 128, "TOKENS_FIRST": True, "num_warps": 8, "num_stages": 1}
    return {"BLOCK_M": 64, "BLOCK_N": 128, "TOKENS_FIRST": False, "num_warps": 8, "num_stages": 1}


_sparse_attention_op = define_op_by_schema(
    "attn_backends::sparse_attention",
    "(Tensor query, Tensor cache, Tensor indices, Tensor lens, int page_size, Tensor? extra_cache, "
    "Tensor? extra_indices, Tensor? extra_lens, int extra_page_size, float scale, Tensor? sinks) -> Tensor",
    cpu=_sparse_attention,
    cuda=_launch,
    fake=_shape,
)
