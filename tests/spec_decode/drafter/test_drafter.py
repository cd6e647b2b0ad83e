import pytest
import torch

from spec_decode.drafter import Strategy
from spec_decode.model_api import DraftInputs
from tests.spec_decode.drafter.drafter_fixture import (
    CONFIG,
    CONTEXTS,
    GREEDY_AND_HOT,
    MAX_SEQ_LEN,
    STRATEGIES,
    K,
    TwoLayerDraft,
    advancing,
    assert_same,
    mixed,
)


def dense_drafts(fixture, verified, committed):
    """Greedy drafts by attention over each request's whole text, with no cache, page or batch; logits [n, K, V].

    committed: each request's (token ids, hidden states) of earlier rounds; this round's are added to it.
    """

    def attend(inputs):
        spec = fixture.groups[inputs.layer].spec
        query, key, value = inputs.normed_and_rotated()
        lag = torch.arange(len(query))[:, None] - torch.arange(len(query))
        seen = (lag >= 0) & (lag < (spec.sliding_window or len(query)))
        key, value = (x.repeat_interleave(spec.group_size, 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * spec.softmax_scale
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), value)

    rows = []
    for request, (ids, hidden) in enumerate(committed):
        accepted = int(verified.accepted[request])
        ids += [*verified.token_ids[request, 1 : accepted + 1].tolist(), int(verified.next_tokens[request])]
        hidden += list(verified.target_hidden_states[request, : accepted + 1])
        drafted, states, logits = list(ids), list(hidden), []
        for _ in range(fixture.steps):
            positions = torch.arange(len(drafted))
            inputs = DraftInputs(torch.tensor(drafted), torch.stack(states), positions, attend)
            states.append(fixture.model(inputs)[-1])
            logits.append(fixture.model.logits(states[-1]))
            drafted.append(int(logits[-1].argmax()))
        rows.append(torch.stack(logits))
    return torch.stack(rows)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_round_matches_dense_attention(strategy):
    fixture = advancing(strategy=strategy)
    committed = [([], []) for _ in CONTEXTS]
    for round_ in range(4):
        verified = fixture.verified(round_=round_, contexts=[len(ids) for ids, _ in committed])
        drafts = fixture.drafter.propose(verified)
        wanted = dense_drafts(fixture, verified, committed)
        assert drafts.tokens.tolist() == wanted.argmax(-1).tolist()
        torch.testing.assert_close(drafts.logits, wanted, rtol=1e-4, atol=1e-4)


def test_drafts_do_not_depend_on_padding():
    found, expected = (advancing(capture_sizes=[size]).rounds() for size in (3, 4))
    assert [tokens.tolist() for tokens, _ in found] == [tokens.tolist() for tokens, _ in expected]


def test_request_drafts_same_in_another_row():
    fixture = advancing()
    tokens = fixture.drafter.propose(fixture.verified(temperature=1.0)).tokens.clone()
    other = advancing()
    other.load([2, 1])
    found = other.drafter.propose(other.verified(temperature=1.0, rows=[2, 1])).tokens
    assert found.tolist() == tokens[[2, 1]].tolist()


@pytest.mark.parametrize("make", [advancing, mixed])
def test_single_token_is_drafted_by_step_0(make):
    expected = make(steps=1, strategy=Strategy.EAGER).rounds()
    found = make(steps=1)
    assert_same(found.rounds(), expected)
    assert {report.key.kind for report in found.drafter.graphs.reports} == {"step_0"}
    assert expected[0][0].shape == (3, 1)


def test_fewer_steps_draft_the_same_first_tokens():
    def first(steps):
        fixture = advancing(steps=steps, strategy=Strategy.EAGER)
        verified = fixture.verified()._replace(accepted=torch.zeros(3, dtype=torch.int32))
        hidden, ids = verified.target_hidden_states.clone(), verified.token_ids.clone()
        hidden[:], ids[:] = 0.5, 3
        same = verified._replace(target_hidden_states=hidden, token_ids=ids, next_tokens=torch.tensor([1, 2, 3]))
        return fixture.drafter.propose(same).tokens[:, :2].tolist()

    assert first(2) == first(5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_invalid_accepted_count_is_clamped(strategy):
    def drafts(*accepted):
        fixture = advancing(strategy=strategy)
        given = fixture.drafter.propose(fixture.verified()._replace(accepted=torch.tensor(accepted, dtype=torch.int32)))
        return given.tokens, given.logits

    assert_same([drafts(2**31 - 1, -(2**31), 2)], [drafts(K, 0, 2)])


def test_round_writes_only_owned_pages():
    fixture = advancing()
    before = [tensor.clone() for tensor in fixture.caches()]
    fixture.rounds(2)
    for index, (was, tensor) in enumerate(zip(before, fixture.caches(), strict=True)):
        free = fixture.pages[index // 2][3]
        assert torch.equal(tensor[free], was[free])


def test_prompt_prefills_same_alone_and_batched():
    hidden, ids = torch.randn(9, CONFIG.hidden_size), torch.randint(0, CONFIG.vocab_size, (9,))
    together, alone = advancing(limits=[MAX_SEQ_LEN] * 2), advancing(limits=[MAX_SEQ_LEN] * 2)
    together.drafter.prefill(together.tables, [4, 5], [4, 5], ids, hidden)
    alone.load([1])
    alone.drafter.prefill(alone.tables, [5], [5], ids[4:], hidden[4:])
    for index, (found, wanted) in enumerate(zip(alone.caches(), together.caches(), strict=True)):
        pages = alone.pages[index // 2][1]
        torch.testing.assert_close(found[pages], wanted[pages], rtol=1e-5, atol=1e-5)


def test_prefill_writes_only_prompt_positions():
    fixture = advancing(limits=[MAX_SEQ_LEN] * 2)
    before = [tensor.clone() for tensor in fixture.caches()]
    ids, hidden = torch.zeros(9, dtype=torch.int64), torch.randn(9, CONFIG.hidden_size)
    fixture.drafter.prefill(fixture.tables, [4, 5], [4, 5], ids, hidden)
    for index, (was, found) in enumerate(zip(before, fixture.caches(), strict=True)):
        size, rows = found.shape[1], fixture.pages[index // 2]
        written = {rows[r][p // size] * size + p % size for r, n in ((0, 4), (1, 5)) for p in range(n)}
        differs = (found != was).flatten(0, 1).flatten(1).any(1).nonzero().flatten()
        assert set(differs.tolist()) == written


class SmallVocabulary(TwoLayerDraft):
    """Scores every third token of the target's vocabulary."""

    def __init__(self, config):
        super().__init__(config)
        self.token_map = torch.arange(0, config.vocab_size, 3)

    def logits(self, hidden):
        return self.head(hidden)[:, self.token_map]


class MaskedVocabulary(SmallVocabulary):
    """The same draft, which says so by -inf in logits over the whole vocabulary."""

    def __init__(self, config):
        super().__init__(config)
        self.mask = torch.full((config.vocab_size,), float("-inf")).index_fill(0, self.token_map, 0.0)
        self.token_map = None

    def logits(self, hidden):
        return self.head(hidden) + self.mask


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_smaller_vocabulary_drafts_like_masked_one(strategy):
    expected = advancing(strategy=Strategy.EAGER, make_model=MaskedVocabulary).rounds(2, GREEDY_AND_HOT)
    found = advancing(strategy=strategy, make_model=SmallVocabulary).rounds(2, GREEDY_AND_HOT)
    assert_same(found, expected)
