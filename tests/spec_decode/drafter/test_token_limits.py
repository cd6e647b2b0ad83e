import pytest
import torch

from tests.spec_decode.drafter.drafter_fixture import CONTEXTS, MAX_SEQ_LEN, STRATEGIES, K, advancing, mixed


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_request_that_does_not_fit_proposes_nothing_and_is_flagged(strategy):
    limits = [MAX_SEQ_LEN, CONTEXTS[1] + K, MAX_SEQ_LEN]
    fixture = advancing(limits=limits, strategy=strategy)
    drafts = fixture.drafter.propose(fixture.verified())
    assert drafts.tokens[1].tolist() == [-1] * K and (drafts.tokens[[0, 2]] >= 0).all()
    assert fixture.tables.overflow.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_request_that_reaches_its_limit_on_the_way_proposes_nothing_from_there_on(strategy):
    fixture = advancing(limits=[MAX_SEQ_LEN, CONTEXTS[1] + K + 2, MAX_SEQ_LEN], strategy=strategy)
    verified = fixture.verified()._replace(accepted=torch.full((3,), K, dtype=torch.int32))
    # Step 0 ends one token below the limit, so one advance fits.
    tokens = fixture.drafter.propose(verified).tokens
    assert (tokens[1] >= 0).tolist() == [True, True, False, False] and (tokens[[0, 2]] >= 0).all()
    assert fixture.tables.overflow.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("limit", [CONTEXTS[1] + K, CONTEXTS[1] + K + 2])
@pytest.mark.parametrize("make", [advancing, mixed])
def test_neighbours_of_a_request_at_its_limit_draft_the_same(make, limit):
    [(tokens, logits)] = make(limits=[MAX_SEQ_LEN, limit, MAX_SEQ_LEN]).rounds(1)
    [(wanted, wanted_logits)] = make().rounds(1)
    assert tokens[[0, 2]].tolist() == wanted[[0, 2]].tolist()
    assert torch.equal(logits[[0, 2]], wanted_logits[[0, 2]])


def test_a_request_that_does_not_fit_writes_nothing():
    fixture = advancing(limits=[MAX_SEQ_LEN, CONTEXTS[1] + K, MAX_SEQ_LEN])
    before = [tensor.clone() for tensor in fixture.caches()]
    fixture.drafter.propose(fixture.verified())
    for index, (was, tensor) in enumerate(zip(before, fixture.caches(), strict=True)):
        pages = fixture.pages[index // 2][1]
        assert torch.equal(tensor[pages], was[pages])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_request_whose_step_0_ends_exactly_at_its_limit_drafts(strategy):
    fixture = advancing(limits=[MAX_SEQ_LEN, CONTEXTS[1] + K + 1, MAX_SEQ_LEN], strategy=strategy)
    tokens = fixture.drafter.propose(fixture.verified()._replace(accepted=torch.zeros(3, dtype=torch.int32))).tokens
    assert (tokens >= 0).all() and fixture.tables.overflow.tolist() == [0] * 4
