"""A tree that grows by kernels from step to step, beside one that torch grows."""

import pytest
import torch

from builders.kernels.triton_runtime import torch_implementations
from spec_decode.trees import DynamicTree, DynamicTreeConfig
from spec_decode.trees.kernels.keep_best import keep_best
from tests.ops.sample import whole

ROWS = 8


@pytest.mark.parametrize(("width", "steps"), [(1, 3), (3, 3), (5, 2)])
def test_a_grown_tree_is_the_references(width, steps):
    step = torch.zeros(1, dtype=torch.int64)
    config = DynamicTreeConfig(width=width, num_tokens=min(9, width * steps))
    by_kernel, by_torch = (DynamicTree(ROWS, step, config, num_speculative_tokens=steps) for _ in range(2))
    for draw, at in enumerate([*range(steps), *range(steps)]):
        step.fill_(at)
        # So far apart, log-probabilities are exact but for how many share the top.
        logits = whole(-3, 1, ROWS, width if at else 1, 12, seed=draw).float() * 64
        by_kernel.grow(logits)
        with torch_implementations():
            by_torch.grow(logits)
        for name in ("parents", "frontier", "frontier_tokens", "frontier_places"):
            assert torch.equal(getattr(by_kernel, name), getattr(by_torch, name)), name
        assert torch.equal(by_kernel.scores.isinf(), by_torch.scores.isinf())
    found = keep_best(by_kernel.tokens, by_kernel.parents, by_torch.scores, config.num_tokens)
    with torch_implementations():
        wanted = by_torch.kept()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
