"""An independent oracle: attention over each request's logical KV prefix, never through a page, builder or backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from builders import AttentionSpec


def attention(
    spec: AttentionSpec,
    query: Sequence[torch.Tensor],
    key: Sequence[torch.Tensor],
    value: Sequence[torch.Tensor],
    seq_lens: Sequence[int],
    sinks: torch.Tensor | None,
    *,
    dtype: torch.dtype = torch.float64,
    operands: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Per request: query [q, Hq, D] are its last q of seq_lens[r] tokens; key and value [>= seq_len, Hkv, D or E].

    Computed in `dtype`; float64 is the truth. In a lower precision, operands and weights are rounded to it and sums
    are fp32, as an honest kernel of that precision does, to measure what error such a kernel may have. operands: the
    dtype they are rounded to where it is another than that of the output.
    """
    return [
        _one(spec, q, k[:length], v[:length], sinks, dtype, operands or dtype)
        for q, k, v, length in zip(query, key, value, seq_lens, strict=True)
    ]


def _one(
    spec: AttentionSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    dtype: torch.dtype,
    operands: torch.dtype,
) -> torch.Tensor:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    count, length = query.shape[0], key.shape[0]
    out = torch.empty(count, spec.num_q_heads, spec.out_dim, dtype=wide)
    for token in range(count):
        position = length - count + token
        first = 0 if spec.sliding_window is None else max(0, position - spec.sliding_window + 1)
        for kv_head in range(spec.num_kv_heads):
            heads = slice(kv_head * spec.group_size, (kv_head + 1) * spec.group_size)
            keys, values = (rows[first : position + 1, kv_head].to(operands).to(wide) for rows in (key, value))
            scores = query[token, heads].to(operands).to(wide) @ keys.T * spec.softmax_scale
            if spec.soft_cap is not None:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            peak = scores.amax(1)
            if sinks is not None:
                peak = torch.maximum(peak, sinks[heads].to(wide))
            weights = torch.exp(scores - peak[:, None])
            total = weights.sum(1) + (0 if sinks is None else torch.exp(sinks[heads].to(wide) - peak))
            out[token, heads] = (weights.to(operands).to(wide) @ values) / total[:, None]
    return out.to(dtype)


def relative_error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """The worst ||found - truth|| / ||truth|| over (token, head); NaN anywhere is infinite."""
    difference = (found.double().cpu() - truth.double()).norm(dim=-1)
    ratio = difference / truth.double().norm(dim=-1).clamp_min(1e-12)
    return float(torch.nan_to_num(ratio, nan=float("inf")).max()) if ratio.numel() else 0.0
