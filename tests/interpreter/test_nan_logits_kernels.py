"""Kernels on NaN logits of a draft return tokens of the vocabulary, and on those of a target no token."""

import pytest
import torch

from builders.kernels.triton_runtime import torch_implementations
from spec_decode.sampling.kernels.sample_block import sample_block
from spec_decode.sampling.kernels.sample_draft import sample_draft
from spec_decode.sampling.kernels.select_candidates import select_candidates
from spec_decode.sampling.target_sampler import sample_target
from spec_decode.trees.kernels.top_children import top_children
from spec_decode.verification.kernels.block_verify import block_verify
from spec_decode.verification.kernels.rejection_sample import rejection_sample
from spec_decode.verification.kernels.verify_arguments import VerifyArguments
from tests.ops.sample import int32, noise
from tests.ops.sampling import draft, verify_arguments, without_distribution
from tests.spec_decode.verification.verify_helpers import sampling_of

NAN = torch.nan


def sampled(columns, vocab):
    logits = noise(4 * columns, vocab, seed=vocab) * 1.5
    logits[1] = NAN
    tokens, cached = torch.full((4, columns), 7), torch.full((4, columns, vocab), 7.0)
    sample_block(
        logits, torch.tensor([0.0, 0.7, 1.0, 0.0]), torch.arange(4), torch.arange(4 * columns), int32(*[5] * 4),
        tokens, cached, int32(*[9] * 4), int32(columns), torch.zeros(1), None,
    )  # fmt: skip
    return tokens, cached


@pytest.mark.parametrize(("columns", "vocab"), [(1, 3), (4, 37), (7, 600), (15, 2100)])
def test_sample_block_keeps_nan_logits(columns, vocab):
    tokens, cached = sampled(columns, vocab)
    with torch_implementations():
        _, wanted = sampled(columns, vocab)
    assert torch.equal(cached.nan_to_num(9), wanted.nan_to_num(9)) and tokens.lt(vocab).all()


def test_no_candidate_is_nan():
    logits = noise(3, 9)
    logits[0], logits[1, :8], logits[2, :3] = NAN, NAN, NAN
    candidates = torch.tensor([[2, 5, 7], [2, 5, 8], [0, 4, 2]])
    tokens, cached = torch.full((3, 1), 7), torch.full((3, 1, 9), -torch.inf)
    select_candidates(
        logits, candidates, torch.zeros(3, 2), *torch.zeros(2, 9, 2).unbind(),
        torch.zeros(3, dtype=torch.int64), torch.tensor([1.0, 0.0, 1.0]), torch.arange(3), torch.arange(3),
        int32(5, 5, 5), tokens, cached, torch.zeros(3, 1, 3, dtype=torch.int64), int32(9, 9, 9), int32(1),
        torch.zeros(1),
    )  # fmt: skip
    assert 0 <= int(tokens[0]) < 9 and tokens[1:].tolist() == [[8], [4]]
    assert cached.isfinite().nonzero()[:, [0, 2]].tolist() == [[1, 8], [2, 4]] and not cached.isnan().any()


def test_step_with_nan_logits_drafts_valid_token():
    sample_draft(*(arguments := draft(torch.full((2, 4100), NAN), [0.0, 1.0], [5, 5])))
    tokens = arguments[6][:2, 1]
    assert ((tokens >= 0) & (tokens < 4100)).all()


def test_nan_logits_have_no_tree_children():
    logits = torch.full((3, 700), -torch.inf)
    logits[0, 650], logits[0, 3], logits[1] = 1.0, 0.5, NAN
    tokens, scores = top_children(logits, 3, None)
    assert tokens[0, :2].tolist() == [650, 3] and ((tokens >= 0) & (tokens < 700)).all()
    assert (scores > -torch.inf).tolist() == [[True, True, False], [False] * 3, [False] * 3]


@pytest.mark.parametrize("verify", [rejection_sample, block_verify])
@pytest.mark.parametrize("whose", ["processed", "draft_logits"])
def test_no_draft_is_accepted_on_nan_logits(verify, whose):
    arguments = verify_arguments(2, 600, ends=False)
    nothing = arguments._replace(**{whose: torch.full_like(getattr(arguments, whose), NAN)})
    if whose == "draft_logits":
        # A greedy row does not read them.
        nothing = nothing._replace(temperature=torch.ones(10))
    accepted, next_tokens = verify(*nothing.checked())
    assert accepted.eq(0).all()
    assert next_tokens.eq(-1).all() if whose == "processed" else ((next_tokens >= 0) & (next_tokens < 600)).all()


@pytest.mark.parametrize("verify", [rejection_sample, block_verify])
def test_draft_ends_before_nan_logits(verify):
    arguments = verify_arguments(3, 600, ends=False)._replace(temperature=torch.ones(10))
    after = torch.arange(3) >= torch.arange(10)[:, None] % 3
    nothing = arguments._replace(draft_logits=arguments.draft_logits.masked_fill(after[..., None], NAN))
    ended = arguments._replace(draft_tokens=arguments.draft_tokens.masked_fill(after, -1))
    found, wanted = verify(*nothing.checked()), verify(*ended.checked())
    assert all(map(torch.equal, found, wanted)) and set(found[0].tolist()) == {0, 1, 2}


@pytest.mark.parametrize("verify", [rejection_sample, block_verify])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_is_accepted_up_to_invalid_logits(verify, temperature):
    for p in without_distribution(10, 3, 1100):
        # The draft is sure of token 5, the target nearly so: of a random row's first token, one draw in two is kept.
        q = torch.full((10, 2, 1100), -torch.inf)
        q[..., 5], p[:, 0] = 0, -torch.inf
        p[:, 0, 5], p[:, 0, 9] = 0.1, 0.0
        tokens, zeros = torch.full((10, 2), 5), torch.zeros(10, dtype=torch.int64)
        arguments = VerifyArguments(p, tokens, q, torch.full((10,), temperature), zeros, zeros, torch.arange(10))
        accepted, next_tokens = verify(*arguments.checked())
        assert accepted.sum() == 10 if temperature == 0 else 0 < accepted.sum() < 10
        assert next_tokens.tolist() == [-1 if kept else 9 for kept in accepted]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.5), (5, 0.5)])
@pytest.mark.parametrize("min_p", [0.0, 0.1])
def test_target_samples_nothing_from_invalid_logits(temperature, top_k, top_p, min_p):
    for logits in without_distribution(2, 3, 1100):
        sampling = sampling_of(2, temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        tokens = sample_target(logits, sampling=sampling, positions=torch.arange(6).view(2, 3))
        assert tokens[:, 1].eq(-1).all() and tokens[:, ::2].ge(0).all() and tokens.lt(1100).all()
