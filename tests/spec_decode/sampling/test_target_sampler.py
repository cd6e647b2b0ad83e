import pytest
import torch

from builders import BatchError
from spec_decode.sampling.logit_edits import LogitEdits, Penalties, RowEdits
from spec_decode.sampling.target_sampler import process_target_logits, sample_target
from tests.spec_decode.verification.verify_helpers import sampling_of

ROWS, VOCAB = 3, 7
ZEROS = torch.zeros(ROWS, dtype=torch.int64)
REFUSED = {
    "flat logits": lambda: process_target_logits(torch.zeros(ROWS, VOCAB), sampling_of(ROWS), ZEROS),
    "temperatures of fewer rows": lambda: process_target_logits(torch.zeros(ROWS, 1, VOCAB), sampling_of(1), ZEROS),
    "a restriction of fewer rows": lambda: process_target_logits(torch.zeros(ROWS, 1, VOCAB), restricted_for(1), ZEROS),
    "positions of fewer rows": lambda: process_target_logits(torch.zeros(ROWS, 1, VOCAB), sampling_of(ROWS), ZEROS[:1]),
    "edits of fewer rows": lambda: process_target_logits(torch.zeros(ROWS, 1, VOCAB), edited(1), ZEROS),
    "edits of another vocabulary": lambda: process_target_logits(torch.zeros(ROWS, 1, VOCAB), edited(vocab=9), ZEROS),
    "drafts of too many columns": lambda: process_target_logits(
        torch.zeros(ROWS, 2, VOCAB), edited(), ZEROS, torch.zeros(ROWS, 2, dtype=torch.int64)
    ),
    "a column of int32": lambda: sample(torch.zeros(ROWS, 1, VOCAB), column=ZEROS.int()),
    "columns of flat logits": lambda: sample(torch.zeros(ROWS, VOCAB), column=ZEROS),
    "a draw at no position": lambda: sample(torch.zeros(ROWS, VOCAB), positions=ZEROS[:0]),
    "a draw for fewer requests": lambda: sample(torch.zeros(ROWS + 1, VOCAB)),
    "a position for a column of two": lambda: sample(torch.zeros(ROWS, 2, VOCAB)),
}


def restricted_for(rows):
    """Parameters of ROWS rows, whose top_k and top_p are of another number."""
    return sampling_of(ROWS)._replace(top_k=sampling_of(rows).top_k, top_p=sampling_of(rows).top_p)


def edited(rows=ROWS, vocab=VOCAB):
    return sampling_of(ROWS)._replace(edits=LogitEdits.allocate(rows, vocab, "cpu"))


def test_edits_of_several_columns_need_their_drafts():
    with pytest.raises(BatchError, match="logits have 2 columns and sampling has edits, but there are no draft_tokens"):
        process_target_logits(torch.zeros(ROWS, 2, VOCAB), edited(), ZEROS)


@pytest.mark.parametrize("parents", [None, [0, 0, 1, 3, 3], [0, 1, 2, 0, 4]])
def test_each_column_counts_the_drafts_on_its_path(parents):
    rows, vocab = 40, 6
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, 6, vocab, generator=generator)
    drafts = torch.randint(0, vocab, (rows, 5), generator=generator)
    edits = LogitEdits.allocate(rows, vocab, "cpu")
    edits.load([RowEdits([], Penalties(1.5, 0.4, 0.7), [row % vocab], [0, 1, 1][: row % 4]) for row in range(rows)])
    sampling, positions = sampling_of(rows, 1.0)._replace(edits=edits), torch.arange(6).expand(rows, -1)
    paths = None if parents is None else torch.tensor(parents).expand(rows, -1)
    found = sample_target(logits, sampling=sampling, positions=positions, draft_tokens=drafts, parents=paths)
    for column in range(6):
        counts, query = edits.counts.clone(), column
        while query > 0:
            counts.scatter_add_(1, drafts[:, query - 1 : query], torch.full((rows, 1), 2, dtype=torch.int32))
            query = query - 1 if parents is None else parents[query - 1]
        own = sampling._replace(edits=edits._replace(counts=counts))
        assert torch.equal(
            found[:, column], sample_target(logits[:, column], sampling=own, positions=positions[:, column])
        )
        place = {"positions": positions[:, column], "column": torch.full((rows,), column)}
        assert torch.equal(
            found[:, column], sample_target(logits, sampling=sampling, draft_tokens=drafts, parents=paths, **place)
        )


def sample(logits, positions=ZEROS, column=None):
    return sample_target(logits, sampling=sampling_of(ROWS, 1.0), positions=positions, column=column)


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_wrong_tensors_are_refused(call):
    with pytest.raises(BatchError, match=r"must be torch\."):
        call()


def test_only_the_given_column_is_sampled():
    logits = torch.zeros(2, 3, VOCAB)
    logits[0, 2, 5] = logits[1, 0, 3] = 1.0
    tokens = sample_target(logits, sampling=sampling_of(2), positions=ZEROS[:2], column=torch.tensor([2, 0]))
    assert tokens.tolist() == [5, 3]


def test_every_column_is_sampled_at_its_position():
    logits, positions = torch.randn(ROWS, 4, VOCAB), torch.arange(4 * ROWS).view(ROWS, 4)
    sampling = sampling_of(ROWS, 1.0)
    sampling.top_k[1] = 3
    columns = [sample_target(logits[:, at], sampling=sampling, positions=positions[:, at]) for at in range(4)]
    assert torch.equal(sample_target(logits, sampling=sampling, positions=positions), torch.stack(columns, 1))


def test_restricted_row_draws_from_remaining_tokens():
    sampling = sampling_of(ROWS, 1.0)
    sampling.top_k[1] = 1
    logits = torch.zeros(ROWS, VOCAB)
    logits[1, 4] = 1e-3
    drawn = torch.stack([sample_target(logits, sampling=sampling, positions=ZEROS + at) for at in range(50)])
    assert drawn[:, 1].eq(4).all() and drawn[:, 0].unique().numel() == VOCAB


@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_min_p_keeps_tokens_that_transformers_keeps(temperature, min_p):
    logits = torch.randn(50, 100, generator=torch.Generator().manual_seed(0)) * 2
    found = process_target_logits(logits[:, None], sampling_of(50, temperature, min_p=min_p), torch.arange(50))[:, 0]
    wanted = pytest.importorskip("transformers").MinPLogitsWarper(min_p)(None, logits / temperature)
    assert torch.equal(found, wanted)


def test_processed_logits_are_a_new_tensor():
    logits = torch.zeros(1, 1, VOCAB)
    process_target_logits(logits, sampling_of(1), ZEROS[:1]).fill_(1)
    assert not logits.any()
