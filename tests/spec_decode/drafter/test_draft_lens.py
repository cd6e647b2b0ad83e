import pytest
import torch

from spec_decode.drafter import Strategy
from tests.spec_decode.drafter.drafter_fixture import (
    GREEDY_AND_HOT,
    STRATEGIES,
    K,
    advancing,
    mixed,
    piecewise,
    preplanned,
)

LENGTHS = [2, 0, 3]


def cut(tokens, lengths):
    """These drafts, each ended after so many tokens."""
    after = torch.arange(tokens.shape[1]) >= torch.tensor(lengths)[:, None]
    return tokens.masked_fill(after, -1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_request_drafts_its_given_length(strategy):
    [(whole, _)] = advancing(strategy=Strategy.EAGER).rounds(1, GREEDY_AND_HOT)
    fixture = advancing(strategy=strategy)
    verified = fixture.verified(temperature=GREEDY_AND_HOT)
    drafts = fixture.drafter.propose(verified._replace(draft_lens=torch.tensor(LENGTHS, dtype=torch.int32)))
    assert drafts.tokens.tolist() == cut(whole, LENGTHS).tolist()
    assert fixture.drafter.propose(verified).tokens.tolist() == whole.tolist(), "a round without lengths drafts all"


@pytest.mark.parametrize("make", [mixed, preplanned, piecewise])
def test_requests_stop_separately_in_every_group_kind(make):
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    one, other = make(), make(strategy=Strategy.EAGER)
    for round_ in range(2):
        found, expected = (
            s.drafter.propose(s.verified(round_=round_)._replace(draft_lens=lengths)) for s in (one, other)
        )
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert (found.tokens >= 0).sum(1).tolist() == LENGTHS


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_stopped_request_writes_no_key_or_overflow(strategy):
    def caches(lengths):
        fixture = advancing(strategy=strategy)
        before = [tensor.clone() for tensor in fixture.caches()]
        fixture.drafter.propose(fixture.verified()._replace(draft_lens=torch.tensor(lengths, dtype=torch.int32)))
        assert fixture.tables.overflow.tolist() == [0] * 4
        return [
            (found != was).flatten(2).any(2).sum().item() for found, was in zip(fixture.caches(), before, strict=True)
        ]

    # Step 0 writes 1 + K keys of each; how many it kept decides which of them later steps write over.
    assert all(fewer <= more for fewer, more in zip(caches([0, 1, 0]), caches([K] * 3), strict=True))
    assert caches([0, 0, 0]) == caches([1, 1, 1]) == [3 * (K + 1)] * 4


def test_draft_lens_written_in_place_persist_until_reset():
    fixture = advancing()
    fixture.drafter.propose(fixture.verified())
    fixture.drafter.inputs.draft_lens[:3] = torch.tensor(LENGTHS)
    assert (fixture.drafter.propose().tokens >= 0).sum(1).tolist() == LENGTHS
    assert (fixture.drafter.propose(fixture.verified()).tokens >= 0).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_shorter_round_drafts_first_tokens_with_same_graphs(strategy):
    [(whole, logits)] = advancing(strategy=Strategy.EAGER).rounds(1, 1.0)
    fixture = advancing(strategy=strategy)
    fixture.drafter.capture()
    verified, reports = fixture.verified(temperature=1.0), list(fixture.drafter.graphs.reports)
    for count in (K, 2, 0, 1, 3, K):
        drafts = fixture.drafter.propose(verified, num_tokens=count)
        assert drafts.tokens.tolist() == whole[:, :count].tolist()
        assert torch.equal(drafts.logits, logits[:, :count])
        assert fixture.drafter.drafts.tokens[:3].tolist() == cut(whole, [count] * 3).tolist()
    assert fixture.drafter.propose(verified).tokens.tolist() == whole.tolist()
    assert fixture.drafter.graphs.reports == reports


@pytest.mark.parametrize("strategy", [Strategy.PER_STEP, Strategy.EAGER])
def test_round_without_later_steps_launches_none(strategy):
    fixture = advancing(strategy=strategy)
    for count in (0, 1, 2):
        fixture.drafter.propose(fixture.verified(), num_tokens=1)
        fixture.drafter.launch_later_steps(4, count)
        assert max(fixture.drafter.metadata_in_use()) == max(0, count - 1)


@pytest.mark.parametrize(
    ("lengths", "loop_steps", "steps"),
    [
        ([0, 0, 0], 1, 1), ([1, 1, 0], 1, 1), ([2, 0, 1], 1, 1), ([3, 1, 2], 1, 2), ([1, 4, 2], 1, K - 1),
        ([0, 0, 0], 2, 1), ([2, 0, 1], 2, 1), ([3, 1, 2], 2, 3), ([1, 4, 2], 2, 3),
    ],
)  # fmt: skip
def test_device_loop_checks_for_stop_after_loop_steps(lengths, loop_steps, steps):
    fixture = advancing(strategy=Strategy.DEVICE_LOOP, loop_steps=loop_steps)
    fixture.drafter.propose(fixture.verified()._replace(draft_lens=torch.tensor(lengths, dtype=torch.int32)))
    assert max(fixture.drafter.metadata_in_use()) == steps


def confident_lens(tokens, logits, least):
    """How many tokens of each request are drafted until the first one below the least confidence, itself included."""
    kept = logits.softmax(-1).gather(2, tokens[..., None])[..., 0] >= least
    return [min(int(row.int().cumprod(0).sum()) + 1, K) for row in kept]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_request_stops_after_low_confidence_token(strategy):
    [(whole, logits)] = advancing(strategy=Strategy.EAGER).rounds(1, GREEDY_AND_HOT)
    confidence = logits.softmax(-1).gather(2, whole[..., None])
    least = float(confidence.flatten().sort().values[5])
    lengths = confident_lens(whole, logits, least)
    assert min(lengths) < K
    [(found, _)] = advancing(strategy=strategy, min_confidence=least).rounds(1, GREEDY_AND_HOT)
    assert found.tolist() == cut(whole, lengths).tolist()
