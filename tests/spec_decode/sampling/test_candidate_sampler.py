"""Tokens drawn in turn among candidates equal those of single steps with logits shifted by the token before."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from builders import BatchError
from spec_decode.sampling import DraftSampler
from spec_decode.trees.kernels.top_children import top_children
from tests.spec_decode.sampling.test_sample_block import draw_settings, make_sampler, step_by_step

VOCAB, WIDTH, RANK = 23, 5, 3


def make(rows, columns, *, width=WIDTH, confidence=0.0):
    return DraftSampler(
        torch.full((rows,), 9, dtype=torch.int32),
        torch.zeros(rows, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
        num_speculative_tokens=columns,
        vocab_size=VOCAB,
        num_candidates=width,
        min_confidence=confidence,
    )


class Rounds:
    """Random inputs of a round, and what each column's logits are once the token before is known."""

    def __init__(self, rows, columns, seed):
        generator = torch.Generator().manual_seed(seed)
        self.rows, self.columns = rows, columns
        self.logits = 3 * torch.randn(rows * columns, VOCAB, generator=generator)
        self.gates = torch.randn(rows * columns, RANK, generator=generator)
        self.codebooks = torch.randn(2, VOCAB, RANK, generator=generator).unbind()
        self.next_tokens = torch.randint(0, VOCAB, (rows,), generator=generator)
        self.positions = torch.randint(0, 99, (rows, 1), generator=generator) + torch.arange(columns)

    def select(self, sampler, width=WIDTH):
        sampler.select_block(
            self.logits,
            top_children(self.logits, width, None)[0],
            self.gates,
            self.codebooks,
            self.next_tokens,
            self.positions.flatten(),
        )

    def after(self, column, previous):
        """The logits [R, V] of a column after the tokens int64 [R], -inf for what is no candidate."""
        predecessors, successors = self.codebooks
        gates = self.gates.view(self.rows, self.columns, -1)[:, column]
        whole = self.logits.view(self.rows, self.columns, -1)[:, column]
        shifted = whole + (predecessors[previous] * gates) @ successors.T
        found = torch.zeros_like(whole, dtype=torch.bool).scatter_(1, whole.topk(WIDTH).indices, True)
        return shifted.masked_fill(~found, -torch.inf)


@given(
    rows=st.integers(1, 4),
    columns=st.integers(1, 5),
    seed=st.integers(0, 2**20),
    confidence=st.sampled_from([0.0, 0.3, 0.6]),
)
def test_block_is_drawn_like_single_steps(rows, columns, seed, confidence):
    one, each = make(rows, columns, confidence=confidence), make_sampler(rows, columns, confidence)
    seq_lens = torch.randint(0, 3, (rows,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    one._rows["seq_lens"].copy_(seq_lens)
    for round_ in range(2):
        given_ = Rounds(rows, columns, seed + round_)
        for sampler in (one, each):
            draw_settings(sampler, seed)
        given_.select(one)
        # Its own choices, of a greedy or random row that never stops, are what the next column's logits follow.
        free = make(rows, columns)
        draw_settings(free, seed)
        free.draft_lens.fill_(columns)
        free.num_tokens.fill_(columns)
        given_.select(free)
        before = torch.cat([given_.next_tokens[:, None], free.draft_tokens[:, :-1]], 1)
        logits = torch.stack([given_.after(column, before[:, column]) for column in range(columns)], 1)
        step_by_step(logits, given_.positions, seq_lens, each)
        assert one.draft_tokens.tolist() == each.draft_tokens.tolist()
        torch.testing.assert_close(one.draft_logits, each.draft_logits, rtol=1e-5, atol=1e-5)


def test_previous_scores_are_cleared():
    sampler = make(2, 3)
    for seed in range(4):
        Rounds(2, 3, seed).select(sampler)
        assert sampler.draft_logits.isfinite().sum(-1).eq(WIDTH).all()


def test_place_with_fewer_candidates_draws_among_them():
    sampler, given_ = make(1, 2, width=4), Rounds(1, 2, seed=1)
    given_.logits[:, 2:9], given_.logits[:, 9:] = torch.nan, -torch.inf
    given_.select(sampler, 4)
    assert sampler.draft_tokens.lt(2).all() and sampler.draft_logits.isfinite().sum(-1).eq(2).all()


WRONG = {
    "logits": torch.zeros(6, VOCAB + 1),
    "gates": torch.zeros(5, RANK),
    "next_tokens": torch.zeros(2, dtype=torch.int32),
    "positions": torch.zeros(5, dtype=torch.int64),
    "codebooks": (torch.zeros(VOCAB, RANK + 1), torch.zeros(VOCAB, RANK)),
}


@pytest.mark.parametrize("name", [*WRONG, "candidates"])
def test_tensors_of_other_shape_or_dtype_are_rejected(name):
    sampler, given_ = make(2, 3), Rounds(2, 3, seed=0)
    sampler.draft_tokens.fill_(7)
    width = WIDTH
    if name == "candidates":
        width = WIDTH - 1
    else:
        setattr(given_, name, WRONG[name])
    with pytest.raises(BatchError):
        given_.select(sampler, width)
    assert sampler.draft_tokens.eq(7).all()
