"""Which inputs get gradients from an embedding concatenated with a hidden state."""

import pytest
import torch

from spec_decode.models.kernels.embed_concat import embed_concat

TOKENS, WIDTH, VOCAB = 3, 4, 7


@pytest.mark.outside_inference_mode
@pytest.mark.parametrize("part", ["embedding", "hidden", "norm of the embedding", "norm of the hidden state"])
def test_each_input_gets_a_gradient_alone(part):
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "embedding": torch.randn(VOCAB, WIDTH, generator=generator),
        "hidden": torch.randn(TOKENS, WIDTH, generator=generator),
        "norm of the embedding": torch.ones(WIDTH),
        "norm of the hidden state": torch.ones(WIDTH),
    }
    learning = inputs[part].requires_grad_()
    embedding, hidden, *norms = inputs.values()
    embed_concat(torch.tensor([0, 6, 3]), embedding, hidden, norms, 1e-6).square().sum().backward()
    assert learning.grad.abs().sum() > 0
