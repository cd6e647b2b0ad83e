import math

import pytest
import torch
from scipy import stats

from spec_decode.sampling import sample_target
from spec_decode.verification import verifier
from tests.spec_decode.verification.verify_helpers import COUNT, FIRST, sampling_of, verified

STEPS, VOCAB = 3, 5
MEANS = [0.0, 0.1, 0.5, 1.0, 1.3, 2.0, 2.999, 3.0]


def synthetic(mean):
    return verifier(f"synthetic:{mean}", num_speculative_tokens=STEPS)


def accepted(mean, *, rows=COUNT, first=FIRST, temperature=1.0, drafts=None, logits=None):
    drafts = torch.zeros(rows, STEPS, dtype=torch.int64) if drafts is None else drafts
    logits = torch.zeros(rows, STEPS + 1, VOCAB) if logits is None else logits
    return verified(synthetic(mean), logits, drafts, temperature=temperature, first=first).accepted


def is_the_mean(counts, mean):
    floor = math.floor(mean)
    more = counts - floor
    assert ((more == 0) | (more == 1)).all()
    return stats.binomtest(int(more.sum()), len(counts), mean - floor).pvalue > 1e-4


@pytest.mark.parametrize("mean", MEANS)
def test_the_mean_over_requests_is_the_asked_one(mean):
    assert is_the_mean(accepted(mean), mean)


@pytest.mark.parametrize("mean", MEANS)
def test_the_mean_over_the_rounds_of_a_request_is_the_asked_one(mean):
    logits = torch.zeros(COUNT, STEPS + 1, VOCAB)
    output = synthetic(mean).verify(
        logits, torch.zeros(COUNT, STEPS, dtype=torch.int64), logits[:, 1:],
        sampling=sampling_of(COUNT, seeds=torch.full((COUNT,), 7)), draft_positions=torch.arange(COUNT),
    )  # fmt: skip
    assert is_the_mean(output.accepted, mean)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_neither_model_nor_temperature_changes_what_is_accepted(temperature):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1000, STEPS + 1, VOCAB, generator=generator)
    drafts = torch.randint(0, VOCAB, (1000, STEPS), generator=generator)
    found = accepted(1.5, rows=1000, temperature=temperature, drafts=drafts, logits=logits)
    assert torch.equal(found, accepted(1.5, rows=1000))


@pytest.mark.parametrize("draft", [[1, 2, -1], [1, -1, 2], [-1, 1, 2]], ids=str)
def test_no_more_is_accepted_than_was_proposed(draft):
    found = accepted(2.5, rows=1000, drafts=torch.tensor([draft]).expand(1000, -1))
    assert found.eq(draft.index(-1)).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_next_token_is_the_one_plain_decoding_draws_there(temperature):
    logits = torch.randn(1000, STEPS + 1, VOCAB, generator=torch.Generator().manual_seed(0))
    output = verified(synthetic(1.5), logits, torch.zeros(1000, STEPS, dtype=torch.int64), temperature=temperature)
    plain = sample_target(
        logits[torch.arange(1000), output.accepted], sampling=sampling_of(1000, temperature),
        positions=FIRST + output.accepted,
    )  # fmt: skip
    assert torch.equal(output.next_tokens, plain)
