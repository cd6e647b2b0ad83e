from dataclasses import replace

import pytest
import torch

from builders import BatchError, RequestTables
from spec_decode.drafter import Drafter, DrafterConfig, Strategy, check_draft
from spec_decode.model_api import CandidateTable, ContextBlockDraft
from spec_decode.trees import DynamicTreeConfig
from tests.spec_decode.drafter.drafter_fixture import MAX_SEQ_LEN, K, TwoLayerDraft, advancing, assert_same

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


WRONG_MODELS = {
    "no states size": ({"target_states_size": None}, r"TwoLayerDraft\.target_states_size must be an int .* got None"),
    "a size of 0": ({"hidden_size": 0}, r"TwoLayerDraft\.hidden_size must be an int of 1 or more, got 0"),
    "at once, of no kind": ({"drafts_at_once": True}, "drafts at once, so it must say how"),
}


@pytest.mark.parametrize(("fields", "message"), WRONG_MODELS.values(), ids=WRONG_MODELS)
def test_incomplete_draft_model_is_rejected(fields, message):
    def make(config):
        model = TwoLayerDraft(config)
        for name, value in fields.items():
            setattr(model, name, value)
        return model

    with pytest.raises(BatchError, match=message):
        advancing(strategy=Strategy.EAGER, make_model=make)


def test_states_that_are_no_tensor_are_rejected(monkeypatch):
    fixture = advancing(strategy=Strategy.EAGER)
    monkeypatch.setattr(fixture.model, "forward", lambda inputs: None)
    with pytest.raises(BatchError, match=r"must return states \[4, 64\] for .*, got NoneType"):
        fixture.drafter.propose(fixture.verified())


def test_tree_over_groups_without_trees_is_rejected():
    fixture = advancing()
    config = DrafterConfig(num_speculative_tokens=K, tree=DynamicTreeConfig(width=2, num_tokens=6))
    with pytest.raises(BatchError, match=r"group group0 has a spec without one; .* Make the groups with tree=True"):
        Drafter(fixture.model, fixture.groups, fixture.tables, config)


def test_layer_in_no_group_or_two_is_rejected():
    fixture = advancing(strategy=Strategy.EAGER)
    fixture.model.layers.append(fixture.model.layers[0])
    with pytest.raises(BatchError, match=r"layer 2 asks for attention .* have the layers \[0, 1\]"):
        fixture.drafter.propose(fixture.verified())
    with pytest.raises(BatchError, match=r"a layer belongs to one KV group, .* the layers \[0, 0\]"):
        groups = [fixture.groups[0], replace(fixture.groups[1], caches=fixture.groups[0].caches)]
        Drafter(fixture.model, groups, fixture.tables, DrafterConfig(num_speculative_tokens=K))


class RuledDraft(ContextBlockDraft):
    """A block draft that only has a rule."""

    vocab_size = hidden_size = target_states_size = max_positions = 8
    mask_token_id = 0
    rule = None

    @property
    def place_logits(self):
        return self.rule

    layer_groups = forward = logits = write_context = None


def table(num_candidates=2, rows=8, ranks=(3, 3)):
    tables = [torch.zeros(rows, rank) for rank in ranks]
    return CandidateTable(num_candidates, *tables, gates=lambda hidden: hidden[:, :3])


WRONG_RULES = {
    "another object": ({"rule": torch.zeros(2)}, "a TokenBias, a CandidateTable or None, got Tensor"),
    "a reduced vocabulary": (
        {"rule": table(), "token_map": torch.arange(4)},
        "must score the target's whole vocabulary, got one with a token_map",
    ),
    "too many candidates": ({"rule": table(9)}, "num_candidates must be 1 to the 8 tokens .* got 9"),
    "no candidates": ({"rule": table(0)}, "num_candidates must be 1 to the 8 tokens .* got 0"),
    "a table of another vocabulary": ({"rule": table(rows=7)}, r"predecessors must be \[8, N\].* got \[7, 3\]"),
    "tables of two ranks": ({"rule": table(ranks=(3, 2))}, r"successors must be \[8, N\].* got \[8, 2\]"),
    "a first place of 2": ({"first_place": 2}, "first_place is 2. Set it to 0 or 1"),
}


@pytest.mark.parametrize(("fields", "message"), WRONG_RULES.values(), ids=WRONG_RULES)
def test_wrong_rule_of_block_is_rejected(fields, message):
    draft = RuledDraft()
    for name, value in fields.items():
        setattr(draft, name, value)
    for tree in (None, DynamicTreeConfig(width=2, num_tokens=3)):
        with pytest.raises(BatchError, match=message):
            check_draft(draft, DrafterConfig(num_speculative_tokens=3, tree=tree))
