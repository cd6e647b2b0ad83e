import math

import pytest
import torch
from scipy import stats

from builders import BatchError
from spec_decode.sampling.target_sampler import sample_target
from spec_decode.verification import SyntheticAcceptance, verifier
from tests.spec_decode.verification.verify_helpers import COUNT, FIRST, sampling_of, verified

STEPS, VOCAB = 3, 5
MEANS = [0.0, 0.1, 1.0, 1.3, 2.999, 3.0]
MANY = torch.full((COUNT,), 7)


def synthetic(mean, *, rows=COUNT, temperature=1.0, drafts=None, logits=None, seeds=None, first=FIRST):
    drafts = torch.zeros(rows, STEPS, dtype=torch.int64) if drafts is None else drafts
    logits = torch.zeros(rows, STEPS + 1, VOCAB) if logits is None else logits
    how = verifier(f"synthetic:{mean}", num_speculative_tokens=STEPS)
    return verified(how, logits, drafts, temperature=temperature, seeds=seeds, first=first)


def is_the_mean(counts, mean):
    floor = math.floor(mean)
    more = counts - floor
    assert ((more == 0) | (more == 1)).all()
    return stats.binomtest(int(more.sum()), len(counts), mean - floor).pvalue > 1e-4


@pytest.mark.parametrize("along", [{}, {"seeds": MANY, "first": torch.arange(COUNT)}], ids=["requests", "rounds"])
@pytest.mark.parametrize("mean", MEANS)
def test_synthetic_mean_is_met_over_requests_and_rounds(mean, along):
    assert is_the_mean(synthetic(mean, **along).accepted, mean)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_synthetic_acceptance_ignores_model_and_temperature(temperature):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1000, STEPS + 1, VOCAB, generator=generator)
    drafts = torch.randint(0, VOCAB, (1000, STEPS), generator=generator)
    found = synthetic(1.5, rows=1000, temperature=temperature, drafts=drafts, logits=logits)
    assert torch.equal(found.accepted, synthetic(1.5, rows=1000).accepted)


@pytest.mark.parametrize("draft", [[1, 2, -1], [1, -1, 2], [-1, 1, 2]], ids=str)
def test_accepted_tokens_never_exceed_proposed(draft):
    found = synthetic(2.5, rows=1000, drafts=torch.tensor([draft]).expand(1000, -1))
    assert found.accepted.eq(draft.index(-1)).all()


@pytest.mark.parametrize("mean", [-1.0, -1e-9, math.nan, math.inf])
def test_invalid_synthetic_mean_is_rejected(mean):
    with pytest.raises(BatchError, match=f"the mean of synthetic acceptance is {mean}. Pass a finite number of 0"):
        SyntheticAcceptance(mean)


@pytest.mark.parametrize("shape", [(2, STEPS, VOCAB + 3), (2, STEPS, VOCAB - 1), (2, STEPS + 1, VOCAB), (2, STEPS)])
def test_draft_logits_of_other_vocabulary_are_rejected(shape):
    with pytest.raises(BatchError, match=r"draft_logits must .*\[2, 3, 5\]"):
        verifier("synthetic:1.5", num_speculative_tokens=STEPS).verify(
            torch.zeros(2, STEPS + 1, VOCAB),
            torch.zeros(2, STEPS, dtype=torch.int64),
            torch.zeros(shape),
            sampling=sampling_of(2),
            draft_positions=torch.zeros(2, dtype=torch.int64),
        )


def test_target_logits_with_too_few_columns_are_rejected():
    with pytest.raises(BatchError, match=r"^target_logits must be torch\.float32 \[2, 4, None\]"):
        synthetic(3.0, rows=2, logits=torch.zeros(2, STEPS, VOCAB))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_next_token_matches_plain_sampling(temperature):
    logits = torch.randn(1000, STEPS + 1, VOCAB, generator=torch.Generator().manual_seed(0))
    output = synthetic(1.5, rows=1000, logits=logits, temperature=temperature)
    plain = sample_target(
        logits[torch.arange(1000), output.accepted], sampling=sampling_of(1000, temperature),
        positions=FIRST + output.accepted,
    )  # fmt: skip
    assert torch.equal(output.next_tokens, plain)
