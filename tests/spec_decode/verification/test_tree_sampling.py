import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from builders import BatchError
from spec_decode.graphs.emulator import EmulatedRuntime
from spec_decode.sampling.target_sampler import sample_target
from spec_decode.trees import DraftTree, TreeBatch
from spec_decode.verification import TreeSampling
from spec_decode.verification.kernels.follow_tree import follow_tree
from tests.spec_decode.trees.test_draft_tree import trees
from tests.spec_decode.trees.tree_helpers import TREES, Drafted, Tables, draft, verify
from tests.spec_decode.verification.verify_helpers import FIRST, sampling_of

VOCAB = 5
# Two children of the root, tokens 4 and 6; of the first of them, 5; of the second, 4 and 7; of that 7, 2.
TREE = DraftTree((0, 0, 1, 2, 2, 5))
TOKENS = [4, 6, 5, 4, 7, 2]
GREEDY = {
    "the first branch": ([4, 5, 0, 9, 0, 0, 0], [1, 3], 9),
    "the second branch to its leaf": ([6, 0, 7, 0, 0, 2, 3], [2, 5, 6], 3),
    "half of the second branch": ([6, 0, 4, 0, 8, 2, 3], [2, 4], 8),
    "a cousin's token": ([4, 7, 0, 0, 0, 0, 0], [1], 7),
    "nothing": ([5, 5, 4, 0, 0, 2, 0], [], 5),
}
"""The target's argmax after each query token; the path that is accepted, and the token after it."""


def peaked(tokens):
    return Drafted(
        TREE, torch.tensor([[0, *TOKENS]]), torch.nn.functional.one_hot(torch.tensor([tokens]), 10).float() * 9
    )


@pytest.mark.parametrize(("target", "path", "added"), GREEDY.values(), ids=GREEDY)
def test_greedy_accepts_path_of_target_tokens(target, path, added):
    output = verify(peaked(target))
    assert output.path.tolist() == [path + [-1] * (3 - len(path))]
    assert (output.accepted.tolist(), output.next_tokens.tolist()) == ([len(path)], [added])


def test_nothing_after_tree_end_is_read():
    drafted = peaked([6, 0, 7, 0, 0, 2, 3])
    drafted.p_logits[:, 5:] = math.nan
    parents = torch.tensor([[0, 0, 1, 2, -1, 5]])
    place = {"sampling": sampling_of(1), "draft_positions": torch.tensor([FIRST])}
    batch = TreeBatch(drafted.batch.draft_tokens, parents)
    output = TreeSampling(3).verify(drafted.p_logits, batch, **place)
    assert (output.path.tolist(), output.next_tokens.tolist()) == ([[2, -1, -1]], [7])


@given(trees(), st.integers(0, 2**32))
def test_follow_tree_matches_stepwise_walk(tree, seed):
    generator = torch.Generator().manual_seed(seed)
    drafts = torch.randint(0, 3, (1, tree.num_tokens), generator=generator)
    targets = torch.randint(0, 3, (1, 1 + tree.num_tokens), generator=generator)
    expected, last = [], 0
    while True:
        children = [1 + i for i, parent in enumerate(tree.parents) if parent == last]
        matching = [child for child in children if drafts[0, child - 1] == targets[0, last]]
        if not matching:
            break
        last = matching[0]
        expected.append(last)
    accepted, path, added = follow_tree(drafts, tree.rows(1, "cpu"), targets, tree.max_depth)
    assert path[0, : int(accepted)].tolist() == expected and added.tolist() == [targets[0, last]]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_sampling_matches_plain_decoding(tree, temperature):
    tables = Tables(VOCAB, tree.max_depth)
    drafted = draft(tables, tree, 2000)
    output = verify(drafted, temperature=temperature)
    text = torch.cat([drafted.tokens.gather(1, output.path.clamp(min=0)), output.next_tokens[:, None]], 1)
    text.scatter_(1, output.accepted[:, None], output.next_tokens[:, None])
    last = torch.zeros(2000, dtype=torch.int64)
    for step in range(tree.max_depth + 1):
        positions = torch.full((2000,), FIRST + step)
        last = sample_target(tables.p[step][last], sampling=sampling_of(2000, temperature), positions=positions)
        drawn = step <= output.accepted
        assert torch.equal(text[drawn, step], last[drawn])
    assert output.accepted.unique().tolist() == list(range(tree.max_depth + 1))


def test_graph_verifies_trees_of_each_replay():
    tables = Tables(VOCAB, 2)
    drafted, other = (draft(tables, TREES["two levels"], 64, seed=seed) for seed in (1, 2))
    expected = verify(other, temperature=1.0)
    batch = drafted.batch
    place = {"sampling": sampling_of(64, 1.0), "draft_positions": torch.full((64,), FIRST)}
    verifier, found = TreeSampling(2), []
    graph = EmulatedRuntime().capture(lambda: found.append(verifier.verify(drafted.p_logits, batch, **place)))
    drafted.p_logits.copy_(other.p_logits)
    batch.draft_tokens.copy_(other.batch.draft_tokens)
    graph.replay()
    assert torch.equal(found[0].path, expected.path) and torch.equal(found[0].next_tokens, expected.next_tokens)


def batch_of(drafted, **changes):
    return drafted.batch._replace(**changes)


WRONG = {
    "draft_tokens must be": lambda of: (of.p_logits, batch_of(of, draft_tokens=of.batch.draft_tokens.int())),
    r"draft_tokens must be torch\.int64 \[None, None\]": lambda of: (
        of.p_logits, batch_of(of, draft_tokens=of.batch.draft_tokens[:, 0]),
    ),
    "parents must be": lambda of: (of.p_logits, batch_of(of, parents=of.batch.parents[:, 1:])),
    "target_logits must be": lambda of: (of.p_logits[:, 1:], of.batch),
    "1 to 63 draft tokens, got room for 64": lambda of: (
        torch.zeros(3, 65, VOCAB), TreeBatch(*torch.zeros(2, 3, 64, dtype=torch.int64)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_misfit_tree_tensors_are_rejected(message):
    logits, batch = WRONG[message](draft(Tables(VOCAB, 2), TREES["two levels"], 3))
    place = {"sampling": sampling_of(3), "draft_positions": torch.full((3,), FIRST)}
    with pytest.raises(BatchError, match=message):
        TreeSampling(2).verify(logits, batch, **place)
