"""A step of the draft's sampler, compared row by row with plain Python, and with the laws it draws from."""

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from builders import BatchError
from spec_decode.sampling import DraftSampler, noise
from spec_decode.sampling.draft_sampler import NO_TOKEN

MAP = torch.tensor([30, 4, 9, 17, 3])
OUTPUTS = ("draft_tokens", "draft_logits", "next_ids", "continue_flag")


def drafted(
    logits, temperature, *, seeds=None, positions=None, seq_lens=5, column=1, columns=3, lengths=None, num_tokens=None,
    confidence=0.0, token_map=None, vocab=None, hidden=None, next_hidden=None,
):  # fmt: skip
    """The sampler's outputs and lengths after a call on buffers that held 7s, with room for one row more."""
    rows = len(logits)
    lens = torch.full((rows + 1,), 5, dtype=torch.int32)
    lens[:rows] = torch.as_tensor(seq_lens)
    sampler = DraftSampler(
        lens, torch.full((rows,), 10) if positions is None else positions, torch.tensor([column]),
        num_speculative_tokens=columns, vocab_size=vocab or logits.shape[1], token_map=token_map,
        min_confidence=confidence,
    )  # fmt: skip
    for name in OUTPUTS:
        getattr(sampler, name).fill_(7)
    sampler.temperature[:rows] = torch.as_tensor(temperature)
    sampler.seeds[:rows] = torch.arange(rows) if seeds is None else seeds
    if lengths is not None:
        sampler.draft_lens[:rows] = torch.as_tensor(lengths)
    if num_tokens is not None:
        sampler.num_tokens.fill_(num_tokens)
    sampler(logits, hidden, next_hidden)
    return SimpleNamespace(seq_lens=lens, **{name: getattr(sampler, name) for name in OUTPUTS})


def random_logits(rows, vocab, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


CONFIDENCE = 0.4
EACH_ROWS = ("temperature", "seq_lens", "lengths", "seeds", "positions")


def row_of(logits, temperature, seed, position, ids):
    """A row's processed logits, the index it draws, and whether that is sure enough."""
    processed = logits.float() / temperature if temperature else logits.float()
    scores = processed.tolist()
    if temperature:
        key = noise.key(seed[None], position[None] + 2, noise.DRAFT)
        scores = (processed + noise.gumbel(key, ids)).tolist()
    index = scores.index(max(scores))
    return processed, index, processed.softmax(-1)[index] >= CONFIDENCE


@given(
    seed=st.integers(0, 2**20), column=st.integers(0, 3), confident=st.booleans(), mapped=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_step_matches_plain_python_per_row(seed, column, confident, mapped, dtype):
    rng, rows, columns = random.Random(seed), 5, 3
    ids, vocab = (MAP, 32) if mapped else (torch.arange(11), 11)
    logits = random_logits(rows, len(ids), seed).to(dtype)
    given_ = {
        "temperature": [rng.choice([0.0, 0.5, 1.0, 1.7]) for _ in range(rows)],
        "seq_lens": [rng.choice([0, 4, 9]) for _ in range(rows)],
        "lengths": [rng.randrange(6) for _ in range(rows)],
        "seeds": torch.tensor([rng.randrange(-(2**63), 2**63) for _ in range(rows)]),
        "positions": torch.tensor([rng.randrange(2**20) for _ in range(rows)]),
        "num_tokens": rng.randrange(1, 5),
    }
    found = drafted(
        logits, **given_, column=column, confidence=CONFIDENCE if confident else 0.0, vocab=vocab,
        token_map=MAP if mapped else None,
    )  # fmt: skip
    tokens, cached = torch.full((rows + 1, columns), 7), torch.full((rows + 1, columns, vocab), 7.0)
    next_ids, lens = [0] * rows + [7], [0] * rows + [5]
    for row in range(rows):
        temperature, seq_len, length, *noise_of = (given_[name][row] for name in EACH_ROWS)
        processed, index, sure = row_of(logits[row], temperature, *noise_of, ids)
        limit = min(length, given_["num_tokens"], columns)
        proposes = seq_len > 0 and column < limit
        if column == 0:
            tokens[row] = NO_TOKEN
        if column < columns:
            tokens[row, column] = ids[index] if proposes else NO_TOKEN
            cached[row, column, ids] = processed
        next_ids[row] = int(ids[index]) if proposes else 0
        lens[row] = seq_len if proposes and column + 1 < limit and (sure or not confident) else 0
    assert torch.equal(found.draft_tokens, tokens) and torch.equal(found.draft_logits, cached)
    assert (found.next_ids.tolist(), found.seq_lens.tolist()) == (next_ids, lens)
    assert found.continue_flag.tolist() == [int(any(lens[:rows]))]


def test_greedy_takes_the_first_of_equals():
    logits = torch.zeros(2, 40)
    logits[0, [3, 30]] = logits[1, [17, 18]] = 2.0
    assert drafted(logits, 0.0).draft_tokens[:2, 1].tolist() == [3, 17]


@pytest.mark.parametrize(("minimum", "seq_len"), [(0.5, 5), (math.nextafter(0.5, 1), 5), (0.5 + 2**-24, 0)])
def test_row_continues_at_exactly_minimum_confidence(minimum, seq_len):
    # The minimum is held in fp32: next to 0.5 in fp64 is 0.5.
    assert drafted(torch.zeros(1, 2), 0.0, confidence=minimum).seq_lens[:1].tolist() == [seq_len]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_token_map_draws_like_masked_vocabulary(temperature):
    logits = random_logits(40, 5)
    whole = torch.full((40, 32), float("-inf"))
    whole[:, MAP] = logits
    mapped, expected = drafted(logits, temperature, token_map=MAP, vocab=32), drafted(whole, temperature)
    assert torch.equal(mapped.draft_tokens, expected.draft_tokens) and torch.equal(mapped.next_ids, expected.next_ids)


def test_columns_outside_map_start_at_minus_infinity():
    sampler = DraftSampler(
        torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64),
        num_speculative_tokens=2, vocab_size=32, token_map=MAP,
    )  # fmt: skip
    sampler(torch.zeros(1, 5))
    expected = torch.full((32,), float("-inf")).index_fill(0, MAP, 0.0)
    assert torch.equal(sampler.draft_logits[0, 0], expected)


def test_row_draws_same_token_in_any_batch():
    logits, seeds, positions = random_logits(20, 50), torch.arange(20) * 91, torch.arange(20) * 7
    together = drafted(logits, 1.0, seeds=seeds, positions=positions).draft_tokens[:20, 1].tolist()
    for row in range(20):
        one = slice(row, row + 1)
        alone = drafted(logits[one], 1.0, seeds=seeds[one], positions=positions[one], column=row % 3)
        assert alone.draft_tokens[0, row % 3] == together[row]


@pytest.mark.parametrize("along", ["seeds", "positions"])
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_tokens_are_distributed_as_the_softmax(temperature, along):
    count = 60_000
    logits = random_logits(1, 12, seed=3)
    options = {"seeds": torch.full((count,), 5), "positions": torch.full((count,), 9), along: torch.arange(count)}
    tokens = drafted(logits.expand(count, -1), temperature, columns=2, **options).draft_tokens[:count, 1]
    expected = (logits[0].double() / temperature).softmax(-1).numpy() * count
    assert stats.chisquare(np.bincount(tokens.numpy(), minlength=12), expected).pvalue > 1e-4


def test_hidden_states_are_copied_to_batch_rows():
    hidden, next_hidden = torch.randn(2, 8), torch.full((3, 8), 7.0)
    drafted(random_logits(2, 12), 0.0, hidden=hidden, next_hidden=next_hidden)
    assert torch.equal(next_hidden[:2], hidden) and next_hidden[2].eq(7).all()


REFUSED = {
    "another vocabulary": ({"vocab": 6}, r"logits must be torch\.float32 \[1, 6\]"),
    "a map of another length": (
        {"token_map": MAP[:4], "vocab": 32}, r"logits must be torch\.float32 \[1, 4\] .*, got torch\.float32 \[1, 5\]",
    ),
    "a map of another dtype": ({"token_map": MAP.int(), "vocab": 32}, r"token_map must be torch\.int64"),
    "hidden states of another width": (
        {"hidden": torch.zeros(1, 8), "next_hidden": torch.zeros(1, 9)}, "next_hidden must be",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_tensors_of_other_shape_or_dtype_are_rejected(options, message):
    with pytest.raises(BatchError, match=message):
        drafted(random_logits(1, 5), 0.0, **options)
