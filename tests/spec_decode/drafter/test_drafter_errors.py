import pytest
import torch

from builders import BatchError, RequestTables
from spec_decode.drafter import Drafter, DrafterConfig, Strategy
from tests.spec_decode.drafter.drafter_fixture import MAX_SEQ_LEN, K, advancing, assert_same

REFUSED = {
    "one row too few": (
        lambda it: it._replace(accepted=it.accepted[:2]),
        r"accepted must be torch\.int32 \[3\].*got torch\.int32 \[2\]",
    ),
    "one column too few": (
        lambda it: it._replace(token_ids=it.token_ids[:, 1:]),
        r"token_ids must be .*\[3, 5\].*\[3, 4\]",
    ),
    "another hidden size": (
        lambda it: it._replace(target_hidden_states=it.target_hidden_states[..., :32]),
        r"hidden_states must be .*\[3, 5, 64\]",
    ),
    "another float": (
        lambda it: it._replace(target_hidden_states=it.target_hidden_states.bfloat16()),
        r"must be torch\.float32.*got torch\.bfloat16",
    ),
    "another integer": (
        lambda it: it._replace(context_lens=it.context_lens.long()),
        r"must be torch\.int32 .*got torch\.int64",
    ),
    "another device": (lambda it: it._replace(seeds=it.seeds.to("meta")), "on cpu, got .* on meta"),
    "a tensor left out": (lambda it: it._replace(seeds=None), "seeds must be a tensor, got NoneType"),
    "a list for a tensor": (lambda it: it._replace(accepted=[0, 1, 2]), "accepted must be a tensor, got list"),
    "no verified tokens": (lambda it: [1, 2], "verified must be VerifiedTokens, got list"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_invalid_verified_tokens_are_rejected_before_running(change, message):
    fixture = advancing(strategy=Strategy.EAGER)
    before = [tensor.clone() for tensor in fixture.caches()]
    with pytest.raises(BatchError, match=message):
        fixture.drafter.propose(change(fixture.verified()))
    assert all(map(torch.equal, before, fixture.caches()))
    assert_same(fixture.rounds(1), advancing(strategy=Strategy.EAGER).rounds(1))


@pytest.mark.parametrize("wrong", [lambda x: x[:-1], lambda x: x[:, 1:], lambda x: x[None]])
def test_draft_states_of_wrong_shape_are_rejected(wrong, monkeypatch):
    fixture = advancing(strategy=Strategy.EAGER)
    forward = fixture.model.forward
    monkeypatch.setattr(fixture.model, "forward", lambda inputs: wrong(forward(inputs)))
    with pytest.raises(BatchError, match=r"must return states \[4, 64\] for .*, got \["):
        fixture.drafter.propose(fixture.verified())


def test_tables_exceeding_group_caches_are_rejected():
    fixture = advancing()
    tables = RequestTables(page_sizes=[8, 4], num_pages=[24, 49], max_reqs=4, max_seq_len=MAX_SEQ_LEN, device="cpu")
    with pytest.raises(BatchError, match=r"group1 can name 49 pages, but its caches have 48;"):
        Drafter(fixture.model, fixture.groups, tables, DrafterConfig(num_speculative_tokens=K))


def test_round_without_live_request_is_rejected():
    fixture = advancing()
    fixture.load([])
    with pytest.raises(BatchError, match="at least one live request"):
        fixture.drafter.propose(fixture.verified(rows=slice(0, 0)))


def test_batch_above_largest_capture_is_rejected():
    fixture = advancing(capture_sizes=[1, 2])
    with pytest.raises(BatchError, match="largest captured batch is 2 requests, got 3"):
        fixture.drafter.propose(fixture.verified())


@pytest.mark.parametrize("strategy", [None, Strategy.EAGER])
def test_capture_size_above_table_rows_is_rejected(strategy):
    with pytest.raises(BatchError):
        advancing(capture_sizes=[8], strategy=strategy).rounds(1)


def test_tables_with_other_page_sizes_are_rejected():
    fixture = advancing()
    with pytest.raises(BatchError, match=r"page sizes \[4, 8\] and the tables \[8, 4\]"):
        Drafter(fixture.model, fixture.groups[::-1], fixture.tables, DrafterConfig(num_speculative_tokens=K))


def test_more_draft_tokens_than_places_are_rejected():
    with pytest.raises(BatchError, match=f"needs {MAX_SEQ_LEN + 1} places per request, the tables have {MAX_SEQ_LEN}"):
        advancing(steps=MAX_SEQ_LEN)


@pytest.mark.parametrize(("tokens", "states"), [(2, 3), (3, 2), (4, 4)])
def test_prefill_with_wrong_token_count_writes_nothing(tokens, states):
    fixture = advancing()
    before = [tensor.clone() for tensor in fixture.caches()]
    with pytest.raises(BatchError, match=r"must be torch\.\w+ \[3"):
        fixture.drafter.prefill(
            fixture.tables, [1, 1, 1], [1, 8, 16], torch.zeros(tokens, dtype=torch.int64), torch.zeros(states, 64)
        )
    assert all(map(torch.equal, before, fixture.caches()))


@pytest.mark.parametrize("count", [-1, K + 1, 1.5, True, "2"])
def test_round_with_invalid_token_count_is_rejected(count):
    fixture = advancing()
    with pytest.raises(BatchError, match=f"num_tokens must be 0 to {K} for this drafter, got {count!r}"):
        fixture.drafter.propose(fixture.verified(), num_tokens=count)


def test_arguments_of_another_type_are_named():
    fixture = advancing()
    with pytest.raises(BatchError, match=r"^model must be of type DraftModel, got list\. Pass an instance"):
        Drafter([], fixture.groups, fixture.tables, DrafterConfig(num_speculative_tokens=K))
    with pytest.raises(BatchError, match=r"^config must be of type DrafterConfig, got int\. Pass an instance"):
        Drafter(fixture.model, fixture.groups, fixture.tables, K)
