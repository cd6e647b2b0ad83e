"""A block's tokens equal those of single steps."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from builders import BatchError
from spec_decode.sampling import DraftSampler

VOCAB = 23


def make_sampler(rows, columns, confidence=0.0, token_map=None):
    sampler = DraftSampler(
        torch.full((rows,), 9, dtype=torch.int32),
        torch.zeros(rows, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
        num_speculative_tokens=columns,
        vocab_size=VOCAB,
        token_map=token_map,
        min_confidence=confidence,
    )
    return sampler


def draw_settings(sampler, seed):
    """Of any rows."""
    rows, columns = sampler.draft_tokens.shape
    draws = torch.Generator().manual_seed(seed)
    sampler.temperature.copy_(torch.randint(0, 3, (rows,), generator=draws) / 2)
    sampler.seeds.copy_(torch.randint(-99, 99, (rows,), generator=draws))
    sampler.draft_lens.copy_(torch.randint(-1, columns + 2, (rows,), generator=draws))
    sampler.num_tokens.fill_(int(torch.randint(1, columns + 1, (1,), generator=draws)))


def step_by_step(logits, positions, seq_lens, sampler):
    """logits [R, K, V], positions [R, K]; seq_lens, positions and step are the sampler's own buffers."""
    own_positions, own_lens, step = sampler._positions, sampler._rows["seq_lens"], sampler._step
    own_lens.copy_(seq_lens)
    for column in range(logits.shape[1]):
        step.fill_(column)
        own_positions.copy_(positions[:, column])
        sampler(logits[:, column])


@given(
    rows=st.integers(1, 4),
    columns=st.integers(1, 5),
    seed=st.integers(0, 2**20),
    confidence=st.sampled_from([0.0, 0.1, 0.3]),
    mapped=st.booleans(),
)
def test_block_is_sampled_like_single_steps(rows, columns, seed, confidence, mapped):
    generator = torch.Generator().manual_seed(seed)
    token_map = torch.randperm(VOCAB, generator=generator)[:11] if mapped else None
    width = VOCAB if token_map is None else len(token_map)
    logits = 3 * torch.randn(rows, columns, width, generator=generator)
    positions = torch.randint(0, 99, (rows, 1), generator=generator) + torch.arange(columns)
    seq_lens = torch.randint(0, 3, (rows,), generator=generator, dtype=torch.int32)
    one, each = (make_sampler(rows, columns, confidence, token_map) for _ in range(2))
    for sampler in (one, each):
        draw_settings(sampler, seed)
    one._rows["seq_lens"].copy_(seq_lens)
    one.sample_block(logits.flatten(0, 1), positions.flatten())
    step_by_step(logits, positions, seq_lens, each)
    assert one.draft_tokens.tolist() == each.draft_tokens.tolist()
    torch.testing.assert_close(one.draft_logits, each.draft_logits, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("logits", "positions"),
    [
        (torch.zeros(6, VOCAB + 1), torch.zeros(6, dtype=torch.int64)),
        (torch.zeros(6, VOCAB), torch.zeros(5, dtype=torch.int64)),
        (torch.zeros(6, VOCAB), torch.zeros(6, dtype=torch.int32)),
    ],
)
def test_misfit_logits_or_positions_are_rejected(logits, positions):
    sampler = make_sampler(2, 3)
    sampler.draft_tokens.fill_(7)
    with pytest.raises(BatchError):
        sampler.sample_block(logits, positions)
    assert sampler.draft_tokens.eq(7).all()
