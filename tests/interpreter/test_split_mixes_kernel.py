import pytest
import torch

from builders._triton import torch_implementations
from spec_decode.ops.split_mixes import split_mixes


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("iterations", [1, 20])
@pytest.mark.parametrize("streams", [1, 2, 3, 4])
def test_the_kernel_splits_and_normalises_as_torch_does(streams, iterations):
    mixes = streams * (2 + streams)
    inputs = (noise(5, mixes) * 4, noise(3, seed=1), noise(mixes, seed=2))
    sizes = {"streams": streams, "iterations": iterations, "eps": 1e-3}
    found = split_mixes(*inputs, **sizes)
    with torch_implementations():
        wanted = split_mixes(*inputs, **sizes)
    for name, ours, theirs in zip(("read", "write", "carry"), found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_logits_far_apart_stay_finite():
    mixes = torch.tensor([[0.0] * 8 + [300.0, -300.0, 0.0, 300.0] * 4])
    parts = split_mixes(mixes, torch.ones(3), torch.zeros(24), streams=4, iterations=20, eps=1e-6)
    assert all(torch.isfinite(part).all() for part in parts)
    torch.testing.assert_close(parts[2].sum(1), torch.ones(1, 4), rtol=1e-4, atol=1e-4)
