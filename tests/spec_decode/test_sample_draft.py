import numpy as np
import pytest
import torch
from scipy import stats

from builders import BatchError
from spec_decode.ops import noise
from spec_decode.ops.sample_draft import NO_TOKEN, sample_draft


class Drafted:
    """One call on buffers that held 7s, with room for more rows and columns than it writes."""

    def __init__(self, logits, temperature, *, seeds=None, positions=None, seq_lens=None, column=1, columns=3):
        rows, vocab = logits.shape
        self.tokens = torch.full((rows + 1, columns), 7)
        self.logits = torch.full((rows + 1, columns, vocab), 7.0)
        self.next_ids = torch.full((rows + 1,), 7)
        sample_draft(
            logits,
            temperature=torch.as_tensor(temperature, dtype=torch.float32).expand(rows),
            seeds=torch.arange(rows) if seeds is None else seeds,
            positions=torch.full((rows,), 10) if positions is None else positions,
            seq_lens=torch.full((rows,), 5, dtype=torch.int32) if seq_lens is None else seq_lens,
            step=torch.tensor([column]),
            draft_tokens=self.tokens,
            draft_logits=self.logits,
            next_ids=self.next_ids,
        )


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
    drafted = Drafted(random_logits(3, 50), 1.0, seq_lens=torch.tensor([4, 0, 9], dtype=torch.int32))
    assert drafted.tokens[1, 1] == NO_TOKEN and drafted.next_ids[1] == 0
    assert (drafted.tokens[[0, 2], 1] >= 0).all()


def test_the_next_input_is_the_token():
    drafted = Drafted(random_logits(3, 50), 1.0)
    assert drafted.next_ids[:3].tolist() == drafted.tokens[:3, 1].tolist()


@pytest.mark.parametrize("column", [0, 1, 2])
def test_only_the_named_column_of_the_batchs_rows_is_written(column):
    drafted = Drafted(random_logits(3, 50), 1.0, column=column)
    others = [c for c in range(3) if c != column]
    assert drafted.tokens[:, others].eq(7).all() and drafted.logits[:, others].eq(7).all()
    assert drafted.tokens[3].eq(7).all() and drafted.logits[3].eq(7).all() and drafted.next_ids[3] == 7


def test_a_step_behind_the_last_column_writes_no_column():
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


def test_a_logit_cache_of_another_vocabulary_is_refused():
    ones = torch.ones(1, dtype=torch.int64)
    with pytest.raises(BatchError, match="draft_logits must be"):
        sample_draft(
            torch.zeros(1, 5), temperature=torch.zeros(1), seeds=ones, positions=ones, seq_lens=ones.int(), step=ones,
            draft_tokens=torch.zeros(1, 2, dtype=torch.int64), draft_logits=torch.zeros(1, 2, 6), next_ids=ones.clone(),
        )  # fmt: skip
