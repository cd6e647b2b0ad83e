"""The test oracle: attention over each request's logical KV prefix, independent of pages, builders and backends."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch

from attn_backends import Capabilities
from builders import AttentionSpec
from spec_decode.testing.outcome import Measurements, expect

_EPS = torch.finfo(torch.float32).eps
_SCORE = 32.0
"""Typical magnitude of a score. Two correct kernels sum in different orders: scores differ by this many epsilons, and
their exponentials by that relative amount, on top of the low-precision reference's error."""


_PARTIALS = 4
"""Number of parts of a prefix whose outputs the reference rounds before summing, for a backend with `rounds_partials`:
XQA has four groups of warps at 64 dims, fewer at larger dims, for each CTA that shares a request."""


class LogicalBatch(NamedTuple):
    """Requests without a page table, all on the CPU.

    queries:  [q, num_q_heads, head_dim] each, for its last q tokens
    keys:     [>= seq_len, num_kv_heads, head_dim] each, as attention reads them
    values:   [>= seq_len, num_kv_heads, value_dim] each, likewise
    seq_lens: tokens of each
    sinks:    [num_q_heads], or None
    """

    queries: Sequence[torch.Tensor]
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    seq_lens: Sequence[int]
    sinks: torch.Tensor | None


def attention(
    spec: AttentionSpec,
    batch: LogicalBatch,
    *,
    dtype: torch.dtype = torch.float64,
    operands: torch.dtype | None = None,
    partials: int = 1,
) -> list[torch.Tensor]:
    """Return the output of each request, [q, num_q_heads, value_dim] in `dtype`.

    float64 is the reference. In a lower precision, operands and weights are rounded to it and sums are fp32, as in a
    correct kernel of that precision: its error is what such a kernel can have. operands: dtype to round them to, if not
    the output's. partials: parts of a prefix whose outputs are rounded to `dtype`, and summed in it.
    """
    queries, keys, values, seq_lens, sinks = batch
    return [
        _one(spec, query, key[:length], value[:length], sinks, dtype, operands or dtype, partials)
        for query, key, value, length in zip(queries, keys, values, seq_lens, strict=True)
    ]


def _one(
    spec: AttentionSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    dtype: torch.dtype,
    operands: torch.dtype,
    partials: int,
) -> torch.Tensor:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    count, length = query.shape[0], key.shape[0]
    groups = (spec.num_kv_heads, spec.group_size)
    out = torch.empty(count, spec.num_q_heads, spec.out_dim, dtype=dtype)
    # What a cache stores has been rounded already: a kernel that multiplies in 8 bits reads it as it is.
    query, key, value = query.to(operands).to(wide), key.to(dtype).to(wide), value.to(dtype).to(wide)
    query, key, value = query.unflatten(1, groups), key.transpose(0, 1), value.transpose(0, 1)
    # A sink of +inf leaves the tokens no weight; a sink of -inf has no weight.
    sink = torch.full(groups, -torch.inf, dtype=wide) if sinks is None else sinks.to(operands).to(wide).view(groups)
    for token in range(count):
        position = length - count + token
        first = 0 if spec.sliding_window is None else max(0, position - spec.sliding_window + 1)
        end = position + 1 if spec.causal else length
        keys, values = key[:, first:end], value[:, first:end]
        scores = query[token] @ keys.mT * spec.softmax_scale  # [num_kv_heads, group_size, end - first]
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        peak = torch.maximum(scores.amax(-1), sink)
        weights = torch.exp(scores - peak[..., None])
        total = weights.sum(-1) + torch.exp(sink - peak).masked_fill(sink == torch.inf, 1)
        weights = weights.to(operands).to(wide)
        parts = zip(weights.tensor_split(partials, -1), values.tensor_split(partials, 1), strict=True)
        out[token] = reduce(torch.add, [(part @ rows / total[..., None]).to(dtype) for part, rows in parts]).flatten(
            0, 1
        )
    return out


def relative_error(found: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the worst ||found - reference|| / ||reference||, with norms along the last dim; NaN is infinite."""
    found, reference = found.double().cpu(), reference.double().cpu()
    difference = (found - reference).norm(dim=-1)
    ratio = difference / reference.norm(dim=-1).clamp_min(1e-12)
    return float(torch.nan_to_num(ratio, nan=float("inf")).max()) if ratio.numel() else 0.0


def assert_within_budget(
    out: torch.Tensor, batch: LogicalBatch, spec: AttentionSpec, capabilities: Capabilities, *, contract: str
) -> Measurements:
    """Compare a backend's output with the fp64 reference. Raises CheckFailure beyond the budget.

    out: [>= query tokens, num_q_heads, value_dim], any dtype and device. The budget is twice the error of the
    low-precision reference: what a correct kernel of this precision can have.
    """
    reference = torch.cat(attention(spec, batch))
    quantised = capabilities.quantises_queries and spec.cache_dtype.itemsize == 1
    operands = spec.cache_dtype if quantised else spec.dtype
    partials = _PARTIALS if capabilities.rounds_partials else 1
    low_precision = torch.cat(attention(spec, batch, dtype=spec.dtype, operands=operands, partials=partials))
    expected = f"attention over the logical prefix of {list(batch.seq_lens)} tokens"
    found = out[: reference.shape[0]]
    score = _largest_score(spec, batch)
    return assert_as_precise(found, low_precision, reference, spec, contract=contract, expected=expected, score=score)


def _largest_score(spec: AttentionSpec, batch: LogicalBatch) -> float:
    """Bound the scores by the product of the longest query and the longest key."""
    largest = 0.0
    for query, key, length in zip(batch.queries, batch.keys, batch.seq_lens, strict=True):
        longest = query.double().norm(dim=-1).max() * key[:length].double().norm(dim=-1).max()
        largest = max(largest, float(longest) * spec.softmax_scale)
    return largest


def assert_as_precise(
    found: torch.Tensor,
    low_precision: torch.Tensor,
    reference: torch.Tensor,
    spec: AttentionSpec,
    *,
    contract: str,
    expected: str,
    factor: int = 2,
    score: float = _SCORE,
) -> Measurements:
    """Raise CheckFailure if found's error is more than `factor` times the low-precision reference's.

    found, low_precision, reference: [..., dim] of one shape, in any dtypes. score: the largest score that went through
    the exponential, if larger than typical.
    """
    budget = factor * relative_error(low_precision, reference) + max(score, _SCORE) * _EPS
    error = relative_error(found, reference)
    expect(
        error <= budget,
        contract=contract,
        expected=f"{expected} within {budget:.2e}",
        got=f"relative error {error:.2e} on [{spec.describe()}]",
    )
    return {"error_over_budget": error / budget}
