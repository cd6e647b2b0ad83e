"""The error budget of a backend's output: what its arithmetic may cost, and no more."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from attn_backends.torch_reference import TorchReference
from builders import AttentionSpec
from spec_decode.testing.oracle import LogicalBatch, assert_within_budget, attention
from spec_decode.testing.outcome import CheckFailure, Measurements
from tests.factories import make_spec

SPEC = make_spec(num_q_heads=1, num_kv_heads=1, head_dim=64, dtype=torch.bfloat16)
LENGTH, TILE, GROUPS = 2051, 256, 4
"""As XQA cuts a prefix at 64 dims: tiles of a CTA, each of a part for every group of its warps."""


def batch(seed: int) -> LogicalBatch:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(rows, 1, SPEC.head_dim, generator=generator).to(SPEC.dtype) for rows in (1, LENGTH, LENGTH)
    )
    return LogicalBatch([query], [key], [value], [LENGTH], None)


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(SPEC.dtype).float()


def weights_and_values(given: LogicalBatch, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor]:
    scores = given.queries[0][:, 0].float() @ given.keys[0][:, 0].float().T * spec.softmax_scale
    return torch.exp(scores - scores.amax())[0], given.values[0][:, 0].float()


def with_rounded_partials(given: LogicalBatch) -> torch.Tensor:
    """The groups of a CTA are summed in bf16, and so are those of the CTA that merges the others' outputs."""
    weights, values = weights_and_values(given, SPEC)
    merged = torch.zeros(GROUPS, SPEC.head_dim)
    for cta, (tile, rows) in enumerate(zip(weights.split(TILE), values.split(TILE), strict=True)):
        out = torch.zeros(SPEC.head_dim)
        for part, of in zip(tile.tensor_split(GROUPS), rows.tensor_split(GROUPS), strict=True):
            out = rounded(out + rounded(rounded(part) @ of / tile.sum()))
        merged[cta % GROUPS] += out * tile.sum() / weights.sum()
    total = torch.zeros(SPEC.head_dim)
    for part in merged:
        total = rounded(total + rounded(part))
    return total[None, None]


def measure(given: LogicalBatch, out: torch.Tensor, *, rounds_partials: bool) -> Measurements:
    able = replace(TorchReference.capabilities, rounds_partials=rounds_partials)
    return assert_within_budget(out, given, SPEC, able, contract="attention")


@pytest.mark.parametrize("seed", range(8))
def test_rounded_partials_are_within_declared_budget(seed: int) -> None:
    given = batch(seed)
    assert measure(given, with_rounded_partials(given), rounds_partials=True)["error_over_budget"] < 1


def test_undeclared_rounded_partials_exceed_budget() -> None:
    def beyond(seed: int) -> bool:
        try:
            measure(batch(seed), with_rounded_partials(batch(seed)), rounds_partials=False)
        except CheckFailure:
            return True
        return False

    assert any(map(beyond, range(8)))


def test_missing_heavy_token_exceeds_budget() -> None:
    given = batch(0)
    weights, values = weights_and_values(given, SPEC)
    weights[weights.argmax()] = 0
    short = (weights @ values / weights.sum())[None, None]
    for rounds_partials in (False, True):
        with pytest.raises(CheckFailure, match="relative error"):
            measure(given, short, rounds_partials=rounds_partials)


def test_low_precision_reference_rounds_its_sinks():
    spec, sink = make_spec(sinks=True, dtype=torch.bfloat16), -1 / 3
    heads, dim = spec.num_q_heads, spec.head_dim
    queries, keys = [torch.zeros(1, heads, dim)], [torch.zeros(1, spec.num_kv_heads, dim)]
    batch = LogicalBatch(queries, keys, [torch.ones(1, spec.num_kv_heads, dim)], [1], torch.full((heads,), sink))
    exact, rounded = (attention(spec, batch, dtype=torch.float32, operands=kind)[0] for kind in (None, torch.bfloat16))
    assert exact[0, 0, 0].item() == pytest.approx(1 / (1 + math.exp(sink)))
    assert rounded[0, 0, 0].item() == pytest.approx(1 / (1 + math.exp(torch.tensor(sink).bfloat16().item())))
