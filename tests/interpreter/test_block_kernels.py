"""What a sampled block holds where its logits are NaN."""

import pytest
import torch

from builders.kernels.triton_runtime import torch_implementations
from spec_decode.sampling.kernels.sample_block import sample_block


def sampled(columns, vocab):
    logits = torch.randn(4 * columns, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    logits[1] = torch.nan
    tokens, cached = torch.full((4, columns), 7), torch.full((4, columns, vocab), 7.0)
    lens, live = torch.full((4,), 9, dtype=torch.int32), torch.full((4,), 5, dtype=torch.int32)
    sample_block(
        logits, torch.tensor([0.0, 0.7, 1.0, 0.0]), torch.arange(4), torch.arange(4 * columns), live, tokens, cached,
        lens, torch.tensor([columns]).int(), torch.zeros(1), None,
    )  # fmt: skip
    return tokens, cached


@pytest.mark.parametrize(("columns", "vocab"), [(1, 3), (4, 37), (7, 600), (15, 2100)])
def test_logits_of_nan_are_kept_and_give_tokens_of_the_vocabulary(columns, vocab):
    tokens, cached = sampled(columns, vocab)
    with torch_implementations():
        _, wanted = sampled(columns, vocab)
    assert torch.equal(cached.nan_to_num(9), wanted.nan_to_num(9)) and tokens.lt(vocab).all()
