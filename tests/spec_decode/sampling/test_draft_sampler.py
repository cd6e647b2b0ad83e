import math

import numpy as np
import pytest
import torch
from scipy import stats

from builders import BatchError
from spec_decode.sampling import DraftSampler, noise
from spec_decode.sampling.draft_sampler import NO_TOKEN


class Drafted:
    """One call on buffers that held 7s, with room for one row more than it writes."""

    def __init__(
        self, logits, temperature, *, seeds=None, positions=None, seq_lens=None, column=1, columns=3,
        lengths=None, num_tokens=None, confidence=0.0, token_map=None, vocab=None, hidden=None, next_hidden=None,
    ):  # fmt: skip
        rows = logits.shape[0]
        buffer = torch.full((rows + 1,), 5, dtype=torch.int32)
        self.seq_lens = buffer[:rows]
        if seq_lens is not None:
            self.seq_lens.copy_(torch.tensor(seq_lens))
        self.sampler = sampler = DraftSampler(
            buffer, torch.full((rows,), 10) if positions is None else positions, torch.tensor([column]),
            num_speculative_tokens=columns, vocab_size=vocab or logits.shape[1], token_map=token_map,
            min_confidence=confidence,
        )  # fmt: skip
        self.tokens, self.logits = sampler.draft_tokens.fill_(7), sampler.draft_logits.fill_(7)
        self.next_ids, self.continue_flag = sampler.next_ids.fill_(7), sampler.continue_flag.fill_(7)
        sampler.temperature[:rows] = torch.as_tensor(temperature)
        sampler.seeds[:rows] = torch.arange(rows) if seeds is None else seeds
        if lengths is not None:
            sampler.draft_lens[:rows] = torch.tensor(lengths)
        if num_tokens is not None:
            sampler.num_tokens.fill_(num_tokens)
        sampler(logits, hidden, next_hidden)


def random_logits(rows, vocab, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def test_greedy_takes_the_argmax():
    logits = random_logits(6, 50)
    assert Drafted(logits, 0.0).tokens[:6, 1].tolist() == logits.argmax(-1).tolist()


def test_greedy_takes_the_first_of_equals():
    logits = torch.zeros(2, 40)
    logits[0, [3, 30]] = logits[1, [17, 18]] = 2.0
    assert Drafted(logits, 0.0).tokens[:2, 1].tolist() == [3, 17]


def test_temperatures_are_each_rows_own():
    logits = random_logits(2, 50).repeat(500, 1)
    drafted = Drafted(logits, torch.tensor([0.0, 1.5] * 500)).tokens[:1000, 1]
    assert len(drafted[::2].unique()) == 1 and len(drafted[1::2].unique()) > 10


def test_a_row_that_cannot_advance_gets_no_token_and_a_harmless_next_input():
    drafted = Drafted(random_logits(3, 50), 1.0, seq_lens=[4, 0, 9])
    assert drafted.tokens[1, 1] == NO_TOKEN and drafted.next_ids[1] == 0
    assert (drafted.tokens[[0, 2], 1] >= 0).all()


def test_the_next_input_is_the_token():
    drafted = Drafted(random_logits(3, 50), 1.0)
    assert drafted.next_ids[:3].tolist() == drafted.tokens[:3, 1].tolist()


@pytest.mark.parametrize("column", [0, 1, 2])
def test_only_the_named_column_of_the_batchs_rows_is_written(column):
    drafted = Drafted(random_logits(3, 50), 1.0, column=column)
    others = [c for c in range(3) if c != column]
    assert drafted.tokens[:3, others].eq(NO_TOKEN if column == 0 else 7).all() and drafted.logits[:, others].eq(7).all()
    assert drafted.tokens[3].eq(7).all() and drafted.logits[3].eq(7).all() and drafted.next_ids[3] == 7


def test_a_row_proposes_as_many_tokens_as_it_was_given():
    drafted = Drafted(random_logits(4, 50), 1.0, column=1, lengths=[0, 1, 2, 3])
    assert (drafted.tokens[:4, 1] >= 0).tolist() == [False, False, True, True]
    assert drafted.next_ids[:2].tolist() == [0, 0]


def test_a_row_that_proposed_its_last_token_is_inert_and_the_others_keep_their_length():
    drafted = Drafted(random_logits(4, 50), 1.0, column=1, lengths=[1, 2, 3, 9])
    assert drafted.seq_lens.tolist() == [0, 0, 5, 5] and drafted.continue_flag.tolist() == [1]


def test_the_last_column_ends_every_row():
    drafted = Drafted(random_logits(2, 50), 1.0, column=2, lengths=[9, 3], num_tokens=9)
    assert (drafted.tokens[:2, 2] >= 0).all()
    assert drafted.seq_lens.tolist() == [0, 0] and drafted.continue_flag.tolist() == [0]


def test_the_rounds_number_of_tokens_bounds_every_row():
    drafted = Drafted(random_logits(3, 50), 1.0, column=1, lengths=[3, 1, 3], num_tokens=2)
    assert (drafted.tokens[:3, 1] >= 0).tolist() == [True, False, True]
    assert drafted.seq_lens.tolist() == [0, 0, 0] and drafted.continue_flag.tolist() == [0]


def test_padding_never_sets_the_continue_flag():
    drafted = Drafted(random_logits(2, 50), 1.0, column=0, seq_lens=[0, 0])
    assert drafted.continue_flag.tolist() == [0]


CONFIDENT = torch.tensor([[0.9, 0.05, 0.05], [0.4, 0.35, 0.25]]).log()


def test_a_row_stops_after_a_token_of_low_confidence():
    drafted = Drafted(CONFIDENT, 0.0, confidence=0.5)
    assert drafted.tokens[:2, 1].tolist() == [0, 0] and drafted.seq_lens.tolist() == [5, 0]


@pytest.mark.parametrize(("minimum", "seq_len"), [(0.5, 5), (math.nextafter(0.5, 1), 5), (0.5 + 2**-24, 0)])
def test_a_row_goes_on_with_just_the_minimum_confidence(minimum, seq_len):
    # The minimum is held in fp32: next to 0.5 in fp64 is 0.5.
    assert Drafted(torch.zeros(1, 2), 0.0, confidence=minimum).seq_lens.tolist() == [seq_len]


def test_confidence_is_that_of_the_rows_temperature():
    low, high = (Drafted(CONFIDENT[1:] * 8, t, confidence=0.5) for t in (1.0, 20.0))
    assert (low.seq_lens.tolist(), high.seq_lens.tolist()) == ([5], [0])


def test_confidence_is_that_of_the_token_drawn():
    rows = 200
    drafted = Drafted(CONFIDENT[:1].expand(rows, -1), 1.0, confidence=0.5)
    assert (drafted.seq_lens > 0).tolist() == drafted.tokens[:rows, 1].eq(0).tolist()
    assert 0 < int((drafted.seq_lens > 0).sum()) < rows


def test_without_a_minimum_confidence_no_row_stops():
    assert Drafted(torch.zeros(1, 5000), 0.0).seq_lens.tolist() == [5]


MAP = torch.tensor([3, 4, 9, 17, 30])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_smaller_vocabulary_draws_what_the_whole_one_draws_without_the_other_tokens(temperature):
    logits = random_logits(40, 5)
    whole = torch.full((40, 32), float("-inf"))
    whole[:, MAP] = logits
    mapped, expected = Drafted(logits, temperature, token_map=MAP, vocab=32), Drafted(whole, temperature)
    assert mapped.tokens.tolist() == expected.tokens.tolist()
    assert mapped.next_ids.tolist() == expected.next_ids.tolist()


def test_processed_logits_of_a_smaller_vocabulary_land_in_the_columns_that_the_map_names():
    logits = random_logits(2, 5)
    cached = Drafted(logits, 0.5, token_map=MAP, vocab=32).logits[:2, 1]
    others = torch.ones(32, dtype=torch.bool).index_fill(0, MAP, False)
    assert torch.equal(cached[:, MAP], logits / 0.5) and cached[:, others].eq(7).all()


def test_a_map_of_another_length_than_the_logits_is_refused():
    with pytest.raises(BatchError, match=r"logits must be torch\.float32 \[1, 5\] .*, got torch\.float32 \[1, 4\]"):
        Drafted(random_logits(1, 4), 0.0, token_map=MAP, vocab=32)


def test_a_map_of_another_dtype_is_refused():
    with pytest.raises(BatchError, match=r"token_map must be torch\.int64"):
        Drafted(random_logits(1, 5), 0.0, token_map=MAP.int(), vocab=32)


def test_columns_that_the_map_does_not_name_start_at_minus_infinity():
    sampler = DraftSampler(
        torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64),
        num_speculative_tokens=2, vocab_size=32, token_map=MAP,
    )  # fmt: skip
    sampler(torch.zeros(1, 5))
    expected = torch.full((32,), float("-inf")).index_fill(0, MAP, 0.0)
    assert torch.equal(sampler.draft_logits[0, 0], expected)


def test_a_step_after_the_last_column_writes_no_column():
    drafted = Drafted(random_logits(3, 50), 1.0, column=3)
    assert drafted.tokens.eq(7).all() and drafted.logits.eq(7).all()


def test_processed_logits_are_divided_by_a_positive_temperature_alone():
    logits = random_logits(2, 50)
    drafted = Drafted(logits, torch.tensor([0.0, 0.5]))
    assert torch.equal(drafted.logits[0, 1], logits[0]) and torch.equal(drafted.logits[1, 1], logits[1] / 0.5)


def test_low_precision_logits_are_processed_in_fp32():
    logits = random_logits(1, 50).bfloat16()
    assert torch.equal(Drafted(logits, 0.7).logits[0, 1], logits[0].float() / torch.tensor(0.7))


def test_a_row_draws_the_same_token_in_any_batch_order():
    logits, seeds, positions = random_logits(20, 50), torch.arange(20) * 91, torch.arange(20) * 7
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    there = Drafted(logits, 1.0, seeds=seeds, positions=positions).tokens[:20, 1]
    here = Drafted(logits[order], 1.0, seeds=seeds[order], positions=positions[order]).tokens[:20, 1]
    assert here.tolist() == there[order].tolist()


def test_a_row_draws_the_same_token_alone():
    logits = random_logits(5, 50)
    together = Drafted(logits, 1.0).tokens[:5, 1].tolist()
    alone = [int(Drafted(logits[r : r + 1], 1.0, seeds=torch.tensor([r])).tokens[0, 1]) for r in range(5)]
    assert alone == together


def test_the_column_has_no_part_in_the_draw():
    logits = random_logits(20, 50)
    assert torch.equal(Drafted(logits, 1.0, column=0).tokens[:, 0], Drafted(logits, 1.0, column=2).tokens[:, 2])


@pytest.mark.parametrize("changed", ["seeds", "positions"])
def test_another_seed_or_position_draws_another_token(changed):
    logits = random_logits(1, 50).expand(200, -1)
    fixed = {"seeds": torch.zeros(200, dtype=torch.int64), "positions": torch.zeros(200, dtype=torch.int64)}
    drafted = Drafted(logits, 1.5, **{**fixed, changed: torch.arange(200)})
    assert len(drafted.tokens[:200, 1].unique()) > 10


def test_the_noise_is_that_of_the_position_of_the_token_drawn():
    logits, seeds, positions = random_logits(30, 50), torch.arange(30), torch.arange(30) * 3
    keys = noise.key(seeds, positions + 2, noise.DRAFT)[:, None]
    expected = (logits + noise.gumbel(keys, torch.arange(50)[None])).argmax(-1)
    assert Drafted(logits, 1.0, seeds=seeds, positions=positions).tokens[:30, 1].tolist() == expected.tolist()


@pytest.mark.parametrize("along", ["seeds", "positions"])
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_tokens_are_distributed_as_the_softmax(temperature, along):
    count = 60_000
    logits = random_logits(1, 12, seed=3)
    fixed = {"seeds": torch.full((count,), 5), "positions": torch.full((count,), 9)}
    options = {**fixed, along: torch.arange(count)}
    tokens = Drafted(logits.expand(count, -1), temperature, columns=2, **options).tokens[:count, 1]
    expected = (logits[0].double() / temperature).softmax(-1).numpy() * count
    assert stats.chisquare(np.bincount(tokens.numpy(), minlength=12), expected).pvalue > 1e-4


def test_logits_of_another_vocabulary_are_refused():
    with pytest.raises(BatchError, match=r"logits must be torch\.float32 \[1, 6\]"):
        Drafted(torch.zeros(1, 5), 0.0, vocab=6)


def test_hidden_states_of_another_width_than_the_next_steps_are_refused():
    with pytest.raises(BatchError, match="next_hidden must be"):
        Drafted(random_logits(2, 12), 0.0, columns=2, hidden=torch.zeros(2, 8), next_hidden=torch.zeros(2, 9))


def test_hidden_states_are_copied_to_the_rows_of_the_batch():
    hidden, next_hidden = torch.randn(2, 8), torch.full((3, 8), 7.0)
    Drafted(random_logits(2, 12), 0.0, hidden=hidden, next_hidden=next_hidden)
    assert torch.equal(next_hidden[:2], hidden) and next_hidden[2].eq(7).all()
