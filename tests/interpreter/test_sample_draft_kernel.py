import pytest
import torch

from builders.kernels.triton_runtime import torch_implementations
from spec_decode.sampling import DraftSampler


def drafted(
    logits, temperature, *, column=1, live=None, seed=0, lengths=None, confidence=0.0, token_map=None,
    hidden=None, next_hidden=None,
):  # fmt: skip
    """(tokens, processed logits, next inputs, lengths, continue flag) of one call on buffers that held 7s."""
    rows, vocab = logits.shape
    generator = torch.Generator().manual_seed(seed)
    seq_lens = torch.tensor([*(live or [5] * rows), 5], dtype=torch.int32)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    sampler = DraftSampler(
        seq_lens, torch.randint(0, 2**20, (rows,), generator=generator), torch.tensor([column]),
        num_speculative_tokens=3, vocab_size=vocab if token_map is None else int(token_map.max()) + 2,
        token_map=token_map, min_confidence=confidence,
    )  # fmt: skip
    outputs = sampler.draft_tokens, sampler.draft_logits, sampler.next_ids, seq_lens, sampler.continue_flag
    for output in (*outputs[:3], sampler.continue_flag):
        output.fill_(7)
    sampler.temperature[:rows] = torch.tensor(temperature)
    sampler.seeds[:rows] = seeds
    if lengths is not None:
        sampler.draft_lens[:rows] = torch.tensor(lengths)
    sampler(logits, hidden, next_hidden)
    return outputs


def both_ways(*args, **options):
    by_kernel = drafted(*args, **options)
    with torch_implementations():
        return by_kernel, drafted(*args, **options)


def same(by_kernel, by_torch):
    return all(torch.equal(a, b) for a, b in zip(by_kernel, by_torch, strict=True))


def noise(rows, vocab, seed=0, dtype=torch.float32):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)).to(dtype) * 3


def test_ties_are_won_by_the_first_index_across_blocks():
    logits = torch.zeros(2, 9001)
    logits[0, [4100, 8200]] = logits[1, [5, 4099]] = 1.0
    by_kernel, by_torch = both_ways(logits, [0.0, 0.0])
    assert by_kernel[0][:2, 1].tolist() == [4100, 5] and same(by_kernel, by_torch)


def test_rows_that_propose_nothing():
    by_kernel, by_torch = both_ways(noise(3, 50), [0.0, 1.0, 1.0], live=[0, 4, 0])
    assert by_kernel[0][[0, 2], 1].tolist() == [-1, -1] and same(by_kernel, by_torch)


@pytest.mark.parametrize("column", [0, 1, 2])
def test_rows_that_stop_at_lengths_of_their_own(column):
    by_kernel, by_torch = both_ways(noise(5, 50), [0.0, 1.0, 1.0, 0.5, 1.0], column=column, lengths=[0, 1, 2, 3, 9])
    assert same(by_kernel, by_torch)
    assert by_kernel[4].tolist() == [int(column < 2)]


@pytest.mark.parametrize("vocab", [7, 9001])
def test_rows_that_stop_for_low_confidence(vocab):
    logits = noise(6, vocab)
    logits[::2, 3] += 12
    logits[1::2] *= 0.1
    logits[1, 4096:] = float("-inf")
    by_kernel, by_torch = both_ways(logits, [0.0, 0.7, 1.0, 0.0, 1.9, 1.0], confidence=0.5)
    assert same(by_kernel, by_torch)
    assert 0 < int((by_kernel[3][:6] > 0).sum()) < 6


@pytest.mark.parametrize(("minimum", "seq_len"), [(0.5, 5), (0.5 + 2**-24, 0)])
def test_a_row_goes_on_with_just_the_minimum_confidence(minimum, seq_len):
    assert drafted(torch.zeros(1, 2), [0.0], confidence=minimum)[3][0] == seq_len


@pytest.mark.parametrize("vocab", [5, 5000])
def test_a_smaller_vocabulary_than_the_targets(vocab):
    token_map = torch.randperm(2 * vocab, generator=torch.Generator().manual_seed(0))[:vocab].sort().values
    by_kernel, by_torch = both_ways(noise(3, vocab), [0.0, 0.7, 1.0], token_map=token_map, confidence=0.01)
    assert same(by_kernel, by_torch)
    assert by_kernel[1].eq(7).any()


def test_logits_that_are_no_numbers_give_a_token_of_the_vocabulary():
    tokens = drafted(torch.full((2, 4100), float("nan")), [0.0, 1.0])[0][:2, 1]
    assert ((tokens >= 0) & (tokens < 4100)).all()
