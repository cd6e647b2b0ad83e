"""Strided draft logits and related tensors, such as a transposed product's: samplers and trees read the same values as
from contiguous ones."""

from __future__ import annotations

import pytest
import torch

from spec_decode.sampling import DraftSampler
from spec_decode.trees import BlockTree, DynamicTree, DynamicTreeConfig
from tests.ops.sample import int32, noise

ROWS, STEPS, VOCAB, TREE = 3, 2, 11, DynamicTreeConfig(width=2, num_tokens=3)


def with_gaps(tensor):
    """The same numbers, at other strides."""
    return tensor.unsqueeze(-1).expand(*tensor.shape, 2).clone()[..., 0]


def sampler(cls=DraftSampler, **options):
    new = cls(int32(5, 5, 5), torch.arange(3), torch.zeros(1, dtype=torch.int64), num_speculative_tokens=STEPS,
               vocab_size=VOCAB, **options)  # fmt: skip
    new.temperature.copy_(torch.tensor([0.0, 1.0, 0.7]))
    return new


def step(like):
    draft, next_hidden = sampler(), torch.zeros(ROWS, 4)
    draft(like(noise(ROWS, VOCAB)), like(noise(ROWS, 4)), next_hidden)
    return [draft.draft_tokens, draft.draft_logits, next_hidden]


def block(like):
    draft = sampler()
    draft.sample_block(like(noise(ROWS * STEPS, VOCAB)), like(torch.arange(ROWS * STEPS)))
    return [draft.draft_tokens, draft.draft_logits]


def candidates(like):
    draft, (gates, *codebooks) = sampler(DraftSampler, num_candidates=4), noise(3, VOCAB, 5)
    ids = torch.stack([torch.randperm(VOCAB)[:4] for _ in range(ROWS * STEPS)])
    draft.select_block(
        like(noise(ROWS * STEPS, VOCAB)), like(ids), like(gates[: ROWS * STEPS]), tuple(codebooks),
        like(torch.tensor([7, 2, 9])), like(torch.arange(ROWS * STEPS)),
    )  # fmt: skip
    return [draft.draft_tokens, draft.draft_logits]


def block_tree(like):
    tree = BlockTree(ROWS, TREE, num_speculative_tokens=STEPS, device=torch.device("cpu"))
    tree.grow(like(noise(ROWS * STEPS, VOCAB)), like(int32(2, 0, 1)), like(torch.tensor([0.0, 1.0, 2.0])))
    return [tree.draft_tokens, tree.parents]


def dynamic_tree(like):
    tree = DynamicTree(ROWS, torch.zeros(1, dtype=torch.int64), TREE, num_speculative_tokens=STEPS)
    tree.grow(like(noise(ROWS, 1, VOCAB)), None, like(torch.tensor([0.0, 1.0, 2.0])))
    return [tree.tokens, tree.scores]


@pytest.mark.parametrize("drafted", [step, block, candidates, block_tree, dynamic_tree])
def test_operands_of_any_strides_match_contiguous_ones(drafted):
    torch.manual_seed(0)
    wanted = drafted(torch.Tensor.contiguous)
    torch.manual_seed(0)
    assert all(map(torch.equal, drafted(with_gaps), wanted))
