import pytest
import torch

from tests.spec_decode.drafter.drafter_fixture import CONTEXTS, MAX_SEQ_LEN, STRATEGIES, K, advancing, mixed

ROOMS = {
    "for less than step 0": (0, 0, 0),
    "for step 0 alone, which keeps all": (1, K, 1),
    "for one advance": (2, K, 2),
    "for all that follow from the first token": (1, 0, K),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_request_without_room_drafts_less_and_overflows(strategy):
    """It drafts as many tokens as fit, and is flagged if that is not all of them."""
    fixture = advancing(strategy=strategy)
    for name, (room, accepted, proposed) in ROOMS.items():
        fixture.limits[1] = CONTEXTS[1] + K + room
        fixture.load(range(3))
        verified = fixture.verified()._replace(accepted=torch.full((3,), accepted, dtype=torch.int32))
        before = [tensor.clone() for tensor in fixture.caches()]
        tokens = fixture.drafter.propose(verified).tokens
        assert (tokens[1] >= 0).tolist() == [place < proposed for place in range(K)], name
        assert (tokens[[0, 2]] >= 0).all() and fixture.tables.overflow.tolist() == [0, proposed < K, 0, 0], name
        for index, (was, tensor) in enumerate(zip(before, fixture.caches(), strict=True)):
            pages = fixture.pages[index // 2][1]
            assert torch.equal(tensor[pages], was[pages]) is (room == 0), name


@pytest.mark.parametrize("limit", [CONTEXTS[1] + K, CONTEXTS[1] + K + 2])
@pytest.mark.parametrize("make", [advancing, mixed])
def test_neighbours_of_full_request_draft_the_same(make, limit):
    [(tokens, logits)] = make(limits=[MAX_SEQ_LEN, limit, MAX_SEQ_LEN]).rounds(1)
    [(wanted, wanted_logits)] = make().rounds(1)
    assert tokens[[0, 2]].tolist() == wanted[[0, 2]].tolist()
    assert torch.equal(logits[[0, 2]], wanted_logits[[0, 2]])
