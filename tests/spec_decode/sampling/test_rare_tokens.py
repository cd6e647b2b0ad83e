"""Tokens with tiny probabilities are drawn as often as they should be."""

import math

import pytest
import torch
from scipy import stats

from spec_decode.sampling import DraftSampler, Sampling, noise
from spec_decode.sampling.target_sampler import sample_target
from tests.spec_decode.sampling.noise_words import each_device, seeds_with

VOCAB, POSITION = 1000, 12345


def by_target(logits, seeds):
    ones = torch.ones(len(seeds), device=logits.device)
    sampling = Sampling(
        temperature=ones, top_k=ones.int() * 0, top_p=ones, min_log_p=ones.log() - torch.inf, seeds=seeds
    )
    return sample_target(logits, sampling=sampling, positions=torch.full_like(seeds, POSITION))


def by_draft(logits, seeds):
    sampler = DraftSampler(
        torch.ones_like(seeds, dtype=torch.int32), torch.full_like(seeds, POSITION - 2), torch.zeros_like(seeds[:1]),
        num_speculative_tokens=1, vocab_size=logits.shape[1],
    )  # fmt: skip
    sampler.temperature.fill_(1.0)
    sampler.seeds.copy_(seeds)
    sampler(logits)
    return sampler.draft_tokens[:, 0]


each_sampler = pytest.mark.parametrize(
    ("draw", "stream"), [(by_target, noise.TARGET), (by_draft, noise.DRAFT)], ids=["target", "draft"]
)


def one_and_others(rows, vocab, logit, device):
    """Logits fp32 [rows, vocab]: 0 for the first token, `logit` for each of the others."""
    row = torch.full((vocab,), logit, device=device)
    row[0] = 0.0
    return row.expand(rows, -1)


@each_device
@each_sampler
@pytest.mark.parametrize("token", [1, 517, VOCAB - 1])
def test_rare_token_is_drawn_with_largest_noise(draw, stream, token, device):
    seeds = seeds_with(torch.zeros(1, dtype=torch.int64), torch.tensor([9]), torch.tensor(POSITION), stream, token)
    assert draw(one_and_others(1, VOCAB, math.log(1e-14), device), seeds.to(device)).tolist() == [token]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="10**10 draws of noise take a GPU")
@each_sampler
def test_heavy_tail_is_drawn_at_its_probability(draw, stream):
    rows, vocab, logit, rounds = 2048, 65536, -18.0, 200
    logits = one_and_others(rows, vocab, logit, "cuda").contiguous()
    seeds = torch.arange(rows * rounds, device="cuda").view(rounds, rows)
    drawn = sum(int((draw(logits, each) > 0).sum()) for each in seeds)
    others = (vocab - 1) * math.exp(logit)
    assert stats.binomtest(drawn, rows * rounds, others / (1 + others)).pvalue > 1e-4
