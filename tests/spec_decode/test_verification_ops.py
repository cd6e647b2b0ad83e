"""Ops of verification and around it: their schemas, what they refuse, what a pass begins with and leaves."""

import pytest
import torch

from builders import BatchError
from spec_decode.engine.kernels.prepare_inputs import prepare_inputs
from spec_decode.engine.kernels.update_requests import NextRound, Texts, update_requests
from spec_decode.sampling.kernels.draw_tokens import draw_tokens
from spec_decode.sampling.kernels.process_logits import process_logits
from spec_decode.verification.kernels.block_verify import block_verify
from spec_decode.verification.kernels.draft_round import DraftRound
from spec_decode.verification.kernels.hash_seeds import hash_seeds
from spec_decode.verification.kernels.rejection_sample import rejection_sample
from spec_decode.verification.kernels.synthetic_accept import synthetic_accept

OPS, INT32 = torch.ops.spec_decode, torch.int32
ROWS, STEPS, VOCAB = 3, 2, 7


def zeros(*shape, dtype=torch.int64):
    return torch.zeros(*shape, dtype=dtype)


def draft_round(**changed):
    fields = {
        "processed": torch.randn(ROWS, STEPS + 1, VOCAB), "draft_tokens": zeros(ROWS, STEPS),
        "draft_logits": torch.randn(ROWS, STEPS, VOCAB), "temperature": torch.ones(ROWS), "seeds": zeros(ROWS),
        "coin_seeds": zeros(ROWS), "draft_positions": zeros(ROWS),
    }  # fmt: skip
    return DraftRound(**fields | changed)


def pass_of(drafts, accepted, lens, max_lens):
    """The arguments of update_requests: texts and a next round of 7s, next tokens from 90 on."""
    rows, steps = len(drafts), len(drafts[0])
    texts = Texts(torch.tensor(lens), torch.tensor(max_lens), zeros(rows) + 7, zeros(rows, 2 + steps) + 7)
    told = NextRound(
        zeros(rows, 1 + steps) + 7, *(zeros(rows, dtype=dtype) + 7 for dtype in (INT32, INT32, torch.int64, INT32))
    )
    ids = torch.cat([zeros(rows, 1) + 5, torch.tensor(drafts).clamp(min=0)], 1)
    return torch.tensor(accepted), torch.arange(rows) + 90, ids, torch.tensor(drafts), texts, told


SETTLED = pass_of([[1, 2], [3, -1], [4, 5]], [2, 0, 1], [4, 9, 1], [40, 10, 4])
CALLS = {
    "process_logits": (torch.randn(ROWS, STEPS, VOCAB), torch.ones(ROWS), None),
    "process_logits of a column": (torch.randn(ROWS, STEPS, VOCAB), torch.ones(ROWS), zeros(ROWS)),
    "draw_tokens": (torch.randn(ROWS, VOCAB), torch.ones(ROWS), zeros(ROWS), zeros(ROWS)),
    "rejection_sample": draft_round().arguments(),
    "block_verify": draft_round().arguments(),
    "synthetic_accept": (zeros(ROWS, STEPS), zeros(ROWS), zeros(ROWS), 1.5),
    "hash_seeds": (zeros(ROWS), zeros(ROWS)),
    "prepare_inputs": (zeros(ROWS), zeros(ROWS), zeros(ROWS, STEPS)),
    "update_requests": (*SETTLED[:4], *SETTLED[4], list(SETTLED[5]), 1),
    "update_requests without a drafter": (*SETTLED[:4], *SETTLED[4], [], 0),
}


@pytest.mark.parametrize(("name", "arguments"), CALLS.items(), ids=CALLS)
def test_the_schema_is_true(name, arguments):
    op = getattr(OPS, name.split()[0]).default
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


WRONG = {
    "processed": torch.zeros(ROWS, STEPS, VOCAB),
    "draft_tokens": zeros(ROWS, STEPS, dtype=INT32),
    "draft_logits": torch.zeros(ROWS, STEPS, VOCAB, dtype=torch.bfloat16),
    "temperature": torch.ones(ROWS + 1),
    "seeds": torch.zeros(ROWS),
    "coin_seeds": zeros(1),
    "draft_positions": zeros(ROWS, 1),
}


@pytest.mark.parametrize("judge", [rejection_sample, block_verify])
@pytest.mark.parametrize(("name", "tensor"), WRONG.items(), ids=WRONG)
def test_a_round_of_wrong_tensors_is_refused_by_name(judge, name, tensor):
    with pytest.raises(BatchError, match=f"^{name} must be "):
        judge(draft_round(**{name: tensor}))


def test_logits_that_lie_elsewhere_are_refused():
    with pytest.raises(BatchError, match=r"draft_logits must be .* on cpu, got .* on meta"):
        rejection_sample(draft_round(draft_logits=torch.zeros(ROWS, STEPS, VOCAB, device="meta")))


REFUSED = {
    "flat logits": lambda: process_logits(torch.zeros(ROWS, VOCAB), torch.ones(ROWS)),
    "temperatures of fewer rows": lambda: process_logits(torch.zeros(ROWS, 1, VOCAB), torch.ones(1)),
    "a column of int32": lambda: process_logits(
        torch.zeros(ROWS, 1, VOCAB), torch.ones(ROWS), zeros(ROWS, dtype=INT32)
    ),
    "a draw from bfloat16": lambda: draw_tokens(
        torch.zeros(ROWS, VOCAB).bfloat16(), temperature=torch.ones(ROWS), seeds=zeros(ROWS), positions=zeros(ROWS)
    ),
    "a draw at no position": lambda: draw_tokens(
        torch.zeros(ROWS, VOCAB), temperature=torch.ones(ROWS), seeds=zeros(ROWS), positions=zeros(0)
    ),
    "one seed for all": lambda: synthetic_accept(
        zeros(ROWS, STEPS), seeds=zeros(1), draft_positions=zeros(ROWS), mean=1.0
    ),
    "positions of int32": lambda: hash_seeds(zeros(ROWS), zeros(ROWS, dtype=INT32)),
    "lengths of int32": lambda: prepare_inputs(zeros(ROWS, dtype=INT32), zeros(ROWS), zeros(ROWS, STEPS)),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_wrong_tensors_are_refused(call):
    with pytest.raises(BatchError, match=r"must be torch\..* nothing was run"):
        call()


@pytest.mark.parametrize("index", range(4))
def test_a_refused_pass_settles_nothing(index):
    given = list(pass_of([[1, 2]], [1], [4], [40]))
    given[index] = given[index].int()
    with pytest.raises(BatchError, match="nothing was run"):
        update_requests(*given)
    assert given[4].lens.tolist() == [4] and given[5].accepted.tolist() == [7]


def test_a_next_round_of_wrong_tensors_is_refused():
    *given, told = pass_of([[1, 2]], [1], [4], [40])
    with pytest.raises(BatchError, match=r"accepted must be torch\.int32"):
        update_requests(*given, told._replace(accepted=zeros(1)))


def test_a_pass_begins_with_the_last_token_and_the_draft():
    context_lens, token_ids = prepare_inputs(
        torch.tensor([0, 1, 9]), torch.tensor([0, 5, 6]), torch.tensor([[-1, -1], [3, 4], [3, -1]])
    )
    assert context_lens.tolist() == [0, 0, 8] and context_lens.dtype == INT32
    assert token_ids.tolist() == [[0, 0, 0], [5, 3, 4], [6, 3, 0]]


def test_a_pass_without_a_draft_begins_with_the_last_token():
    assert prepare_inputs(torch.tensor([4, 1]), torch.tensor([7, 5]), zeros(2, 0))[1].tolist() == [[7], [5]]


def test_a_pass_lengthens_texts_by_what_was_kept_and_one_up_to_their_end():
    given = pass_of([[1, 2], [3, -1], [4, 5], [-1, -1]], [2, 0, 1, 0], [4, 9, 1, 0], [40, 10, 2, 0])
    update_requests(*given, position_offset=0)
    texts = given[4]
    assert texts.lens.tolist() == [7, 10, 2, 0] and texts.max_lens.tolist() == [40, 10, 2, 0]
    assert texts.last_tokens.tolist() == [90, 91, 92, 93]


def test_the_news_are_what_was_kept_and_the_targets_own_token_behind():
    given = pass_of([[1, 2], [3, -1], [4, 5]], [2, 0, 1], [4, 9, 1], [40, 10, 4])
    update_requests(*given)
    assert [row[: 2 + row[0]] for row in given[4].news.tolist()] == [[2, 1, 2, 90], [0, 91], [1, 4, 92]]


@pytest.mark.parametrize("position_offset", [0, 1])
def test_the_drafter_is_told_of_the_pass_as_it_was(position_offset):
    given = pass_of([[1, 2], [3, -1], [4, 5]], [2, 0, 1], [4, 9, 0], [40, 11, 4])
    update_requests(*given, position_offset=position_offset)
    told = given[5]
    assert told.token_ids.tolist() == given[2].tolist()
    assert told.context_lens.tolist() == [3 + position_offset, 8 + position_offset, 0]
    assert told.accepted.tolist() == [2, 0, 1] and told.next_tokens.tolist() == [90, 91, 92]


def test_the_texts_last_token_is_never_drafted():
    given = pass_of([[1, 2]] * 5, [0] * 5, [4] * 5, [40, 8, 7, 6, 5])
    update_requests(*given)
    assert given[5].draft_lens.tolist() == [2, 2, 1, 0, 0]


def test_a_pass_without_a_drafter_is_settled_alone():
    *given, told = pass_of([[1, 2]], [1], [4], [40])
    update_requests(*given, None)
    assert given[4].lens.tolist() == [6] and told.accepted.tolist() == [7]


def test_only_the_column_asked_for_is_processed():
    logits = torch.arange(12.0).view(2, 3, 2)
    assert process_logits(logits, torch.tensor([2.0, 0.0]), torch.tensor([2, 0])).tolist() == [[[2, 2.5]], [[6, 7]]]


def test_processed_logits_are_a_tensor_of_their_own():
    logits = torch.zeros(1, 1, VOCAB)
    process_logits(logits, torch.zeros(1)).fill_(1)
    assert not logits.any()
