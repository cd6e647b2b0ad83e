"""Device values that no host can reject: they are inert or masked, and their neighbours' results do not change.

The ops run in torch, and in the kernels' session as kernels. With OUT_OF_RANGE_DEVICE=cuda they run on a GPU, under
memcheck.
"""

import os
from itertools import product

import pytest
import torch

from attn_backends.kernels.latent_attention import latent_attention
from attn_backends.kernels.paged_attention import paged_attention
from attn_backends.kernels.tree_attention import tree_attention
from builders import BatchBuffers, set_extend_state
from builders.kernels.list_window_slots import list_window_slots
from spec_decode.models.kernels.embed_concat import embed_concat
from spec_decode.trees.kernels.ancestor_masks import ancestor_masks
from spec_decode.verification import move_accepted_kv
from spec_decode.verification.kernels.block_verify import block_verify
from spec_decode.verification.kernels.follow_tree import follow_tree
from spec_decode.verification.kernels.rejection_sample import rejection_sample
from spec_decode.verification.kernels.verify_arguments import VerifyArguments
from tests.factories import make_tables

DEVICE = torch.device(os.environ.get("OUT_OF_RANGE_DEVICE", "cpu"))
TABLE = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32, device=DEVICE)
"""Pages of 4 tokens: a row has room for 8."""
LARGEST = 2**31 - 1


@pytest.fixture(autouse=True)
def on_the_device():
    with DEVICE:
        yield


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5), device="cpu").to(DEVICE)


def lens(first, second):
    return torch.tensor([first, second], dtype=torch.int32)


def paged(length, causal, invariant, masks=None, max_seq_len=7):
    return paged_attention(
        noise(4, 2, 16), noise(4, 4, 1, 16), noise(4, 4, 1, 16), TABLE, lens(length, 7),
        torch.tensor([0, 2, 4], dtype=torch.int32), None, masks, 2, max_seq_len, 2, 0.25, None, None, causal, invariant,
        None, None,
    )  # fmt: skip


def latent(length, causal, invariant, masks=None):
    return latent_attention(
        noise(4, 2, 32), noise(4, 4, 32), TABLE, lens(length, 7), torch.tensor([0, 2, 4], dtype=torch.int32), masks,
        2, 2, 16, 0.25, causal, invariant,
    )  # fmt: skip


def tree(length, *_):
    out = noise(4, 2, 16)
    tree_attention(
        noise(4, 2, 16), noise(4, 4, 1, 16), noise(4, 4, 1, 16), TABLE, lens(length, 7),
        torch.tensor([0, 2, 4], dtype=torch.int32), None, torch.tensor([1, 3, 1, 3]), out, noise(4, 2), False, 2, 0.25,
        None, None, None,
    )  # fmt: skip
    return out


FORMS = [
    *product((paged, latent, tree), [(True, False, None), (True, True, None), (False, False, None)]),
    *product((paged, latent), [(True, False, torch.tensor([1, 3, 1, 3], device=DEVICE))]),
]


@pytest.mark.parametrize("length", [-1, -LARGEST, 9, LARGEST])
@pytest.mark.parametrize(("attention", "form"), FORMS)
def test_length_out_of_range_gives_zero_rows(attention, form, length):
    out = attention(length, *form)
    assert out[:2].eq(0).all() and torch.equal(out[2:], attention(7, *form)[2:])


def test_length_beyond_max_seq_len_gives_zero_rows():
    assert paged(8, True, False)[:2].eq(0).all() and paged(8, True, False, max_seq_len=8)[:2].ne(0).any()


def test_tree_longer_than_sequence_gives_zero_rows():
    assert tree(1, True, False)[:2].eq(0).all()


@pytest.mark.parametrize("context", [-5, -1, -LARGEST, 1000, LARGEST])
def test_context_out_of_range_is_inert_and_overflows(context):
    tables = make_tables([8, 8], page_sizes=(4,), max_reqs=2, max_seq_len=8, device=DEVICE)
    batch = BatchBuffers(tables, max_tokens=4)
    set_extend_state(batch, lens(context, 3), 2, 2)
    assert batch.seq_lens.tolist() == [0, 5] and batch.positions.tolist() == [0, 0, 3, 4]
    assert batch.slot_mappings[0, :2].tolist() == [-1, -1] and batch.slot_mappings[0, 2:].ge(0).all()
    assert tables.overflow.tolist() == [1, 0]


@pytest.mark.parametrize("position", [-3, 8, LARGEST, 2**32 + 4])
def test_position_out_of_range_lists_no_slots(position):
    indices, listed = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    list_window_slots(indices, listed, torch.tensor([position, 4]), lens(9, 5), starts, TABLE, 3, 4)
    assert indices.tolist() == [[-1, -1, -1], [2, 3, 8]] and listed.tolist() == [0, 3]


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("token", [-1, 7, 10**9, 2**62, -(2**40)])
def test_id_outside_vocabulary_embeds_as_zero(token, normed):
    norms = [torch.ones(16)] * 2 if normed else []
    embedding, hidden = noise(9, 16)[1:8], noise(2, 16)
    out = embed_concat(torch.tensor([token, 3]), embedding, hidden, norms, 1e-6)
    alone = embed_concat(torch.tensor([3]), embedding, hidden[1:], norms, 1e-6)
    assert out[0, :16].eq(0).all() and torch.equal(out[1:], alone) and alone[:, :16].all()
    assert normed or (torch.equal(out[1, :16], embedding[3]) and torch.equal(out[:, 16:], hidden))


@pytest.mark.parametrize("verify", [rejection_sample, block_verify])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("wrong", "same"), [(-7, -1), (5, None), (10**9, None), (2**62, None)])
def test_draft_id_out_of_range_is_not_accepted(verify, temperature, wrong, same):
    """Models that agree accept all tokens before it. One below 0 is an end, whatever stands behind."""
    logits = noise(1, 4, 5).repeat(2, 1, 1)
    best = logits[:, :3].argmax(-1)

    def run(token):
        drafts = best.clone()
        drafts[0, 1] = token
        arguments = VerifyArguments(
            logits, drafts, logits[:, :3], torch.full((2,), temperature), torch.tensor([1, 1]), torch.tensor([2, 2]),
            torch.tensor([9, 9]),
        )  # fmt: skip
        return verify(*arguments.checked())

    accepted, next_tokens = run(wrong)
    assert accepted.tolist() == [1, 3] and all(0 <= token < 5 for token in next_tokens.tolist())
    assert next_tokens[1] == run(int(best[0, 1]))[1][1]
    if same is not None:
        assert [out.tolist() for out in run(same)] == [accepted.tolist(), next_tokens.tolist()]


WRONG_PARENTS = [-1, 2, 3, 70, 10**9]
"""Of draft token 1, whose parent is 0 or 1."""


@pytest.mark.parametrize("parent", WRONG_PARENTS)
def test_parent_out_of_range_ends_its_tree(parent):
    masks, depths = ancestor_masks(torch.tensor([[0, parent, 1], [0, 1, 1]]))
    assert masks.tolist() == [[1, 3, 0, 0], [1, 3, 7, 11]] and depths.tolist() == [[0, 1, 0, 0], [0, 1, 2, 2]]


@pytest.mark.parametrize("parent", WRONG_PARENTS)
def test_no_path_passes_parent_out_of_range(parent):
    drafts, parents = torch.tensor([[4, 5, 6]] * 2), torch.tensor([[0, parent, 1], [0, 1, 2]])
    accepted, path, next_tokens = follow_tree(drafts, parents, torch.tensor([[4, 5, 6, 7]] * 2), 3)
    assert (accepted.tolist(), path.tolist(), next_tokens.tolist()) == ([1, 3], [[1, -1, -1], [1, 2, 3]], [5, 7])


@pytest.mark.parametrize("token", [-1, 3, 10**9])
def test_path_outside_tree_moves_nothing(token):
    caches, slots = (noise(2, 4, 1, 16), noise(2, 4, 1, 16)), torch.tensor([[0, 1, 2], [4, 5, 6]])
    before = caches[0].clone()
    move_accepted_kv(*caches, slots, torch.tensor([[token], [2]]))
    assert torch.equal(caches[0][0], before[0]) and torch.equal(caches[0][1, 1], before[1, 2])
