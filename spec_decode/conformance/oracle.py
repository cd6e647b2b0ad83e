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
        for head in range(spec.num_q_heads):
            kv_head = head // spec.group_size
            keys = key[first : position + 1, kv_head].to(operands).to(wide)
            scores = keys @ query[token, head].to(operands).to(wide) * spec.softmax_scale
            if spec.soft_cap is not None:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            peak = scores.max() if sinks is None else torch.maximum(scores.max(), sinks[head].to(wide))
            weights = torch.exp(scores - peak)
            total = weights.sum() + (0 if sinks is None else torch.exp(sinks[head].to(wide) - peak))
            values = value[first : position + 1, kv_head].to(operands).to(wide)
            out[token, head] = (weights.to(operands).to(wide) @ values) / total
    return out.to(dtype)


def relative_error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """The worst ||found - truth|| / ||truth|| over (token, head); NaN anywhere is infinite."""
    difference = (found.double().cpu() - truth.double()).norm(dim=-1)
    ratio = difference / truth.double().norm(dim=-1).clamp_min(1e-12)
    return float(torch.nan_to_num(ratio, nan=float("inf")).max()) if ratio.numel() else 0.0
