import pytest
import torch

from spec_decode.models.kernels.embed_concat import embed_concat


def noise(*shape, dtype=torch.float32):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 2).to(dtype)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("token", [-1, -(2**40), 5, 2**40])
def test_a_token_outside_the_vocabulary_embeds_as_zeros(token, normed):
    table, hidden = noise(9, 16)[2:7], noise(2, 16)
    norms = [noise(16)] * 2 if normed else []
    both = embed_concat(torch.tensor([1, token]), table, hidden, norms, 1e-6)
    assert both[1, :16].tolist() == [0] * 16 and both[0, :16].abs().min() > 0
