"""FlashAttention-3 for machines without a GPU: vLLM's entry point in torch, with its kernels' lse.

From softmax.h and epilogue_fwd.hpp (hopper) of Dao-AILab/flash-attention: windows and causality are aligned at the
bottom right, the lse is natural, an empty row is 0 with an lse of -inf, and so is the lse of a row whose sum is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

from attn_backends import AttentionBackend
from attn_backends.fa3_providers import PROVIDER_VARIABLE, Vllm
from tests.backends_over_stand_ins import loaded_over, stand_in_op, unloaded

BACKENDS = {"flash_attn3": "FlashAttn3", "flash_attn3_mla": "FlashAttn3Mla"}
PATHS = [f"attn_backends.{name}" for name in BACKENDS]


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_k: int,
    seqused_k: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    block_table: torch.Tensor,
    num_splits: int,
    fa_version: int,
    return_softmax_lse: bool = False,
    s_aux: torch.Tensor | None = None,
    q_v: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
) -> Any:
    if fa_version != 3 or num_splits < 1:
        raise RuntimeError(f"version 3 with splits of its own is asked for, got {fa_version} and {num_splits}")
    if s_aux is not None and s_aux.dtype is not torch.bfloat16:
        raise RuntimeError(f"sinks must be bf16, got {s_aux.dtype}")
    if q_v is not None:
        if (q.shape[-1], v.shape[-1]) != (64, 512) or q_v.shape[-1] != 512:
            raise RuntimeError(f"q_v takes keys of 64 dims and values of 512, got {q.shape[-1]} and {v.shape[-1]}")
        q, k = torch.cat([q, q_v], -1), torch.cat([k, v], -1)
    for descale in (k_descale, v_descale):
        if descale is not None and (descale.shape, descale.dtype) != ((len(seqused_k), k.shape[2]), torch.float32):
            raise RuntimeError(f"descale must have shape (batch_size, num_heads_k), got {list(descale.shape)}")
    sizes = softmax_scale, causal, *window_size, softcap
    out, lse = attend(q, k, v, cu_seqlens_q, seqused_k, block_table, s_aux, *sizes, k_descale, v_descale)
    return (out, lse) if return_softmax_lse else out


@stand_in_op("flash_attn3_stand_in::attend")
def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    table: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    soft_cap: float,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [T, H, E], in bf16 if queries are e4m3, and lse fp32 [H, T]."""
    tokens, heads, size, kv_heads = *query.shape[:2], key.shape[1], key.shape[2]
    dtype = torch.bfloat16 if query.dtype.itemsize == 1 else query.dtype
    out, lse = torch.zeros(tokens, heads, value.shape[3], dtype=dtype), torch.full((heads, tokens), -math.inf)
    right = 0 if causal else window_right
    bounds = starts.tolist()
    for request, length in enumerate(lens.tolist()):
        rows, at = slice(bounds[request], bounds[request + 1]), torch.arange(length)
        page = table[request, at // size].long()
        if ((page < 0) | (page >= len(key))).any():
            raise RuntimeError(f"illegal memory access: pages {page.tolist()} of {len(key)}")
        keys, values = (
            part[page, at % size].float() * (1.0 if scale is None else scale[request, :, None])
            for part, scale in ((key, key_scale), (value, value_scale))
        )
        place = torch.arange(rows.stop - rows.start)[:, None] + length - (rows.stop - rows.start)
        hidden = (at < place - window_left) & (window_left >= 0) | (at > place + right) & (right >= 0)
        scores = torch.einsum("qkgd,nkd->qkgn", query[rows].float().unflatten(1, (kv_heads, -1)), keys) * scale
        scores = soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores
        scores = scores.masked_fill(hidden[:, None, None], -math.inf).flatten(1, 2)
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[None, :, None].expand(len(scores), -1, 1)], -1)
        sums = scores.logsumexp(-1)
        weights = torch.where((sums == -math.inf)[..., None], 0.0, (scores - sums[..., None]).exp())[..., :length]
        out[rows] = torch.einsum("qkgn,nkd->qkgd", weights.unflatten(1, (kv_heads, -1)), values).flatten(1, 2).to(dtype)
        lse[:, rows] = sums.nan_to_num(-math.inf, posinf=math.inf, neginf=-math.inf).t()
    return out, lse


@contextmanager
def installed(name: str = "flash_attn3") -> Iterator[AttentionBackend]:
    """Yield a backend over the stand-in, on the CPU; nothing stays loaded."""
    names = [Vllm.module.rsplit(".", dots)[0] for dots in (2, 1)] + [Vllm.module]
    modules = {each: ModuleType(each) for each in names}
    vars(modules[Vllm.module]).update(FA3_AVAILABLE=True, flash_attn_varlen_func=flash_attn_varlen_func)
    with unloaded(*PATHS), pytest.MonkeyPatch.context() as patch:
        patch.setenv(PROVIDER_VARIABLE, Vllm.name)
        with loaded_over(modules, f"attn_backends.{name}", BACKENDS[name]) as backend:
            yield backend
