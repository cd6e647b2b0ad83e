"""vLLM's compiled kernels of a layer over latents that are not the decode's, in torch: cache write, gather, prefill."""

from __future__ import annotations

from typing import Any

import torch


def install(monkeypatch: Any) -> None:
    """Install them in vLLM's ops and in its prefill over FlashAttention."""
    import vllm._custom_ops
    from vllm.v1.attention.backends.mla.prefill import flash_attn
    from vllm.v1.attention.ops import merge_attn_states

    monkeypatch.setattr(vllm._custom_ops, "merge_attn_states", merge_attn_states._merge_attn_states_torch)
    for op in (concat_and_cache_mla, gather_and_maybe_dequant_cache):
        monkeypatch.setattr(torch.ops._C_cache_ops, op.__name__, op, raising=False)
    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", flash_attn_varlen_func)


def concat_and_cache_mla(kv_c: Any, k_pe: Any, kv_cache: Any, slots: torch.Tensor, dtype: str, *scales: Any) -> None:
    """Store latents [T, 512] with rotary keys [T, 64] in kv_cache [B, N, 576]."""
    assert not dtype.startswith("fp8")
    live = slots >= 0
    kv_cache.view(-1, kv_cache.shape[-1])[slots[live]] = torch.cat([kv_c, k_pe], -1)[: len(slots)][live]


def gather_and_maybe_dequant_cache(
    cache: torch.Tensor,
    out: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    requests: torch.Tensor,
    tokens: int,
    dtype: str,
    scale: Any,
    first: torch.Tensor | None,
) -> None:
    """Copy `tokens` of the cache [B, N, 576] to out, request by request from starts [R + 1], each from `first` on."""
    assert not dtype.startswith("fp8")
    request = requests[:tokens].long()
    position = torch.arange(tokens) - starts[request] + (0 if first is None else first[request])
    out[:tokens] = cache[table[request, position // cache.shape[1]].long(), position % cache.shape[1]]


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    return_softmax_lse: bool,
    **sizes: Any,
) -> Any:
    """Attend with q [T, H, D] to k and v of each request: out [T, H, E], and the lse fp32 [H, T]."""
    out, lse = q.new_zeros(*q.shape[:2], v.shape[2]), torch.zeros(q.shape[1], len(q))
    ends = zip(cu_seqlens_q[1:].tolist(), cu_seqlens_k[1:].tolist(), strict=True)
    row, key = 0, 0
    for end, key_end in ends:
        scores = torch.einsum("qhd,khd->hqk", q[row:end].float(), k[key:key_end].float()) * softmax_scale
        if causal:
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(scores.shape[2] - scores.shape[1] + 1)
            scores = scores.masked_fill(hidden, -torch.inf)
        out[row:end] = torch.einsum("hqk,khe->qhe", scores.softmax(-1), v[key:key_end].float()).to(out.dtype)
        lse[:, row:end] = scores.logsumexp(-1)
        row, key = end, key_end
    return (out, lse) if return_softmax_lse else out
