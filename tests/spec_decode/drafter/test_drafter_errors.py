import pytest
import torch

from builders import BatchError, RequestTables
from spec_decode.drafter import Drafter, DrafterConfig, Strategy
from tests.spec_decode.drafter.drafter_fixture import MAX_SEQ_LEN, K, advancing, assert_same


def changed(**changes):
    fixture = advancing(strategy=Strategy.EAGER)
    verified = fixture.verified()
    return fixture, verified._replace(**{name: change(getattr(verified, name)) for name, change in changes.items()})


REFUSED = {
    "one row too few": ({"accepted": lambda x: x[:2]}, r"accepted must be torch\.int32 \[3\].*got torch\.int32 \[2\]"),
    "one column too few": ({"token_ids": lambda x: x[:, 1:]}, r"token_ids must be .*\[3, 5\].*\[3, 4\]"),
    "another hidden size": ({"target_hidden_states": lambda x: x[..., :32]}, r"hidden_states must be .*\[3, 5, 64\]"),
    "another float": ({"target_hidden_states": lambda x: x.bfloat16()}, r"must be torch\.float32.*got torch\.bfloat16"),
    "another integer": ({"context_lens": lambda x: x.long()}, r"must be torch\.int32 .*got torch\.int64"),
    "another device": ({"seeds": lambda x: x.to("meta")}, "on cpu, got .* on meta"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_verified_tokens_that_do_not_fit_are_refused(changes, message):
    fixture, verified = changed(**changes)
    with pytest.raises(BatchError, match=message):
        fixture.drafter.propose(verified)


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_nothing_runs_when_verified_tokens_are_refused(changes, message):
    fixture, verified = changed(**changes)
    before = [tensor.clone() for tensor in fixture.caches()]
    with pytest.raises(BatchError):
        fixture.drafter.propose(verified)
    assert all(torch.equal(a, b) for a, b in zip(before, fixture.caches(), strict=True))


@pytest.mark.parametrize("wrong", [lambda x: x[:-1], lambda x: x[:, 1:], lambda x: x[None]])
def test_a_draft_model_that_returns_states_of_another_shape_is_refused(wrong, monkeypatch):
    fixture = advancing(strategy=Strategy.EAGER)
    forward = fixture.model.forward_kept
    monkeypatch.setattr(fixture.model, "forward_kept", lambda *args: wrong(forward(*args)))
    with pytest.raises(BatchError, match=r"need states \[4, 64\], got \["):
        fixture.drafter.propose(fixture.verified())


def test_tables_that_may_name_pages_beyond_a_groups_caches_are_refused():
    fixture = advancing()
    tables = RequestTables(page_sizes=[8, 4], num_pages=[24, 49], max_reqs=4, max_seq_len=MAX_SEQ_LEN, device="cpu")
    with pytest.raises(BatchError, match=r"group1 must name pages of its caches alone, they may name 49 and .* 48;"):
        Drafter(fixture.model, fixture.groups, tables, DrafterConfig(num_speculative_tokens=K))


def test_a_round_without_a_live_request_is_refused():
    fixture = advancing()
    fixture.load([])
    with pytest.raises(BatchError, match="at least one live request"):
        fixture.drafter.propose(fixture.verified(rows=slice(0, 0)))


def test_a_batch_above_the_largest_capture_is_refused():
    fixture = advancing(capture_sizes=[1, 2])
    with pytest.raises(BatchError, match="largest captured batch is 2 requests, got 3"):
        fixture.drafter.propose(fixture.verified())


@pytest.mark.parametrize("strategy", [None, Strategy.EAGER])
def test_a_capture_size_beyond_the_tables_rows_is_refused_in_words(strategy):
    with pytest.raises(BatchError):
        advancing(capture_sizes=[8], strategy=strategy).rounds(1)


def test_tables_of_other_page_sizes_than_the_groups_are_refused():
    fixture = advancing()
    with pytest.raises(BatchError, match=r"page sizes \[4, 8\] against the tables' \[8, 4\]"):
        Drafter(fixture.model, fixture.groups[::-1], fixture.tables, DrafterConfig(num_speculative_tokens=K))


def test_a_drafter_of_no_tokens_is_refused():
    with pytest.raises(BatchError, match="num_speculative_tokens must be 1 or more, got 0"):
        advancing(steps=0)


def test_more_tokens_a_round_than_a_request_has_places_are_refused():
    with pytest.raises(
        BatchError, match=f"takes {MAX_SEQ_LEN + 1} places of a request, these tables hold {MAX_SEQ_LEN}"
    ):
        advancing(steps=MAX_SEQ_LEN)


WRONG = {
    "no verified tokens": (lambda verified: [1, 2], "starts from VerifiedTokens, got list"),
    "a tensor left out": (lambda verified: verified._replace(seeds=None), "seeds must be a tensor, got NoneType"),
    "a list for a tensor": (
        lambda verified: verified._replace(accepted=[0, 1, 2]),
        "accepted must be a tensor, got list",
    ),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_what_is_no_record_of_tensors_is_refused_and_the_next_round_is_right(change, message):
    fixture = advancing(strategy=Strategy.EAGER)
    with pytest.raises(BatchError, match=message):
        fixture.drafter.propose(change(fixture.verified()))
    assert_same(fixture.rounds(1), advancing(strategy=Strategy.EAGER).rounds(1))


SETTINGS = {
    "a fraction of a token": ({"steps": 1.5}, "num_speculative_tokens must be an int, got 1.5"),
    "a truth": ({"steps": True}, "num_speculative_tokens must be an int, got True"),
    "a capture size in words": ({"capture_sizes": ["4"]}, "capture_sizes must be ints, got '4'"),
    "one capture size": ({"capture_sizes": 4}, "capture_sizes must be of type Sequence or None, got 4"),
    "a memory limit in parts": (
        {"graph_memory_limit": 1e9},
        "graph_memory_limit must be an int or None, got 1000",
    ),
    "a strategy in words": ({"strategy": "full_loop"}, "strategy must be of type Strategy or None, got 'full_loop'"),
    "a graph mode in words": ({"graph_mode": "none"}, "graph_mode must be of type GraphMode, got 'none'"),
    "a confidence in words": ({"min_confidence": "x"}, "min_confidence must be a finite number, got 'x'"),
    "no confidence": ({"min_confidence": float("nan")}, "min_confidence must be a finite number, got nan"),
}


@pytest.mark.parametrize(("changed", "message"), SETTINGS.values(), ids=SETTINGS)
def test_settings_of_another_type_are_refused(changed, message):
    with pytest.raises(BatchError, match=message):
        advancing(**changed)


@pytest.mark.parametrize(("tokens", "states"), [(2, 3), (3, 2), (4, 4)])
def test_a_prefill_of_another_number_of_tokens_writes_nothing(tokens, states):
    fixture = advancing()
    before = [tensor.clone() for tensor in fixture.caches()]
    with pytest.raises(BatchError, match=r"must be torch\.\w+ \[3"):
        fixture.drafter.prefill(
            fixture.tables, [1, 1, 1], [1, 8, 16], torch.zeros(tokens, dtype=torch.int64), torch.zeros(states, 64)
        )
    assert all(torch.equal(a, b) for a, b in zip(before, fixture.caches(), strict=True))


@pytest.mark.parametrize("count", [-1, K + 1, 1.5, True, "2"])
def test_a_round_of_a_number_of_tokens_that_the_drafter_has_not_is_refused(count):
    fixture = advancing()
    with pytest.raises(BatchError, match=f"proposes 0 to {K} tokens a round, asked for {count!r}"):
        fixture.drafter.propose(fixture.verified(), num_tokens=count)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "2"])
def test_a_loop_of_no_steps_is_refused(steps):
    with pytest.raises(BatchError, match=f"loop_steps must be (an int|a number of steps, 1 or more), got {steps!r}"):
        advancing(loop_steps=steps)


@pytest.mark.parametrize("least", [-0.1, 1.0])
def test_a_least_confidence_that_is_no_probability_below_1_is_refused(least):
    with pytest.raises(BatchError, match="min_confidence must be a probability below 1"):
        advancing(min_confidence=least)
