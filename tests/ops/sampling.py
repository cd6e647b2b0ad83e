"""Samples of the ops of sampling, verification and trees."""

import torch

from spec_decode.trees import DraftTree, DynamicTree, DynamicTreeConfig
from spec_decode.verification.kernels.verify_arguments import VerifyArguments
from tests.ops.sample import CLOSE, each, int32, noise, op, whole

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def seeds(rows, seed=1):
    return whole(-(2**63), 2**63 - 1, rows, seed=seed)


@op("spec_decode::process_logits", strided="logits")
def process_logits():
    for vocab, dtype, column in each((1100, 3), DTYPES, (None, torch.tensor([2, 0, 1, 2]))):
        yield noise(4, 3, vocab, dtype=dtype), torch.tensor([0.0, 0.7, 1.0, 1e-3]), column, None, None
    yield noise(4, 3, 80)[..., ::2], torch.ones(4), None, None, None
    yield noise(4, 3, 40), torch.full((4,), 2.0), None, int32(2, 3, 39, 0), torch.tensor([1, 0.5, 1, 0.9])


@op("spec_decode::draw_tokens")
def draw_tokens():
    for vocab in (37, 1, 512, 2000):
        yield noise(6, vocab), torch.tensor([0.0, 1.0, 0.5] * 2), seeds(6), whole(0, 2**40, 6, seed=2)


@op("spec_decode::draw_target")
def draw_target():
    for vocab, dtype, column in each((37, 2000), DTYPES[:2], (torch.tensor([2, 0, 1] * 2), None)):
        yield (
            noise(6, 3, vocab, dtype=dtype), noise(6, 1, vocab, seed=1), torch.tensor([0.0, 1.0, 0.5] * 2),
            int32(0, 0, vocab, 5, 0, 7), torch.tensor([1.0, 1, 1, 1, 0.5, 0.5]), seeds(6), whole(0, 2**40, 6, seed=2),
            column,
        )  # fmt: skip


@op("spec_decode::restrict_logits")
def restrict_logits():
    for vocab in (37, 1, 2, 1000, 9001):
        yield noise(4, vocab), int32(5, 0, 5, 0), torch.tensor([1.0, 0.9, 0.8, 1.0])
    yield noise(6, 100), int32(3, 0, 0), torch.tensor([1.0, 0.5, 1.0])


@op("spec_decode::sample_block")
def sample_block():
    for columns, vocab, confidence, dtype in each((4, 1, 15), (37, 600, 2100), (0.0, 0.2), DTYPES[:2]):
        for token_map in (None, torch.randperm(2 * vocab, generator=torch.Generator().manual_seed(0))[:vocab]):
            size = vocab if token_map is None else 2 * vocab
            yield (
                noise(4 * columns, vocab, dtype=dtype), torch.tensor([0.0, 0.7, 1.0, 0.0]), seeds(4),
                whole(0, 2**20, 4 * columns), int32(5, 5, 5, 0), torch.full((4, columns), 7),
                torch.full((4, columns, size), 7.0), int32(9, 9, columns - 1, 9), int32(columns),
                torch.tensor([confidence]), token_map,
            )  # fmt: skip


@op("spec_decode::sample_draft", strided="logits hidden")
def sample_draft():
    widths = None, *(noise(3, width) for width in (24, 1, 1000))
    for vocab, column, confidence, hidden, dtype in each((37, 2, 4100, 9001), (1, 0, 2, 3), (0.0, 0.5), widths, DTYPES):
        for token_map in (None, torch.arange(vocab) * 2):
            size = vocab if token_map is None else 2 * vocab
            yield (
                noise(3, vocab, dtype=dtype), torch.tensor([0.0, 1.0, 0.5]), seeds(3), whole(0, 2**20, 3),
                int32(3, 4, 0), torch.tensor([column]), torch.full((3, 3), 7), torch.full((3, 3, size), 7.0),
                torch.full((3,), 7), int32(2, 1, 3), int32(3), torch.tensor([confidence]), int32(7), token_map, hidden,
                None if hidden is None else torch.full_like(hidden, 7.0),
            )  # fmt: skip


def verify_arguments(steps, vocab):
    p = noise(10, steps + 1, vocab)
    q = p[:, :steps] + noise(10, steps, vocab, seed=1) / 2
    drafts = torch.where(torch.arange(10)[:, None] % 3 > 0, q.argmax(-1), p[:, :steps].argmax(-1))
    temperature = (torch.rand(10, generator=torch.Generator().manual_seed(3)) * 2 - 0.5).clamp(min=0)
    drafts[4:6, -1] = -1
    return VerifyArguments(p, drafts, q, temperature, seeds(10, 4), seeds(10, 5), whole(0, 2**20, 10, seed=6))


@op("spec_decode::rejection_sample")
def rejection_sample():
    for steps, vocab in ((3, 9), (1, 9), (5, 37), (2, 1100)):
        yield verify_arguments(steps, vocab).checked()


@op("spec_decode::block_verify")
def block_verify():
    for steps, vocab in ((3, 9), (1, 9), (5, 37), (2, 1100)):
        yield verify_arguments(steps, vocab).checked()


@op("spec_decode::synthetic_accept")
def synthetic_accept():
    for mean in (1.5, 0.0, 0.4, 1.0, 3.0):
        for steps in (3, 1):
            drafts = torch.zeros(40, steps, dtype=torch.int64)
            drafts[::4, -1] = -1
            yield drafts, seeds(40), whole(0, 2**40, 40, seed=2), mean


@op("spec_decode::hash_seeds")
def hash_seeds():
    for rows in (3, 1, 300):
        yield seeds(rows), whole(0, 2**40, rows, seed=2)


@op("spec_decode::ancestor_masks")
def ancestor_masks():
    yield (torch.tensor([[0, 1, -1], [0, 0, 2]]),)
    for tokens in (1, 7, 63):
        yield (DraftTree.chain(tokens).rows(2, "cpu"),)


@op("spec_decode::follow_tree")
def follow_tree():
    for tokens in (5, 1, 32):
        parents = whole(0, 10**6, 8, tokens) % torch.arange(1, 1 + tokens)
        parents[3, tokens // 2 :] = -1
        for depth in (4, 1, tokens):
            yield whole(0, 3, 8, tokens, seed=1), parents, whole(0, 3, 8, 1 + tokens, seed=2), depth


@op("spec_decode::top_children", close=CLOSE)
def top_children():
    for vocab, width in ((40, 3), (4, 4), (1300, 8), (9000, 2)):
        yield noise(3, vocab), width
        yield noise(3, vocab).round(), width


@op("spec_decode::grow_tree")
def grow_tree():
    config = DynamicTreeConfig(width=2, num_tokens=4)
    tree = DynamicTree(3, torch.zeros(1, dtype=torch.int64), config, num_speculative_tokens=2)
    buffers = tree.tokens, tree.parents, tree.scores
    frontier = tree.frontier, tree.frontier_scores, tree.frontier_tokens, tree.frontier_places
    for step in (0, 1):
        yield torch.tensor([step]), whole(0, 9, 3, 2, 2), whole(-9, 0, 3, 2, 2).float() * 64, *buffers, *frontier


@op("spec_decode::keep_best")
def keep_best():
    for candidates, count in ((20, 9), (1, 1), (70, 9)):
        parents = torch.full((8, candidates), -1)
        yield whole(0, 99, 8, candidates), parents, -whole(0, 9, 8, candidates, seed=1).float(), count


@op("spec_decode::place_frontier", strided="hidden")
def place_frontier():
    seq_lens = int32(0, 9, 30)
    for at, width, steps in ((0, 3, 4), (1, 3, 4), (3, 3, 4), (0, 1, 2), (1, 1, 2), (5, 8, 9)):
        queries = width * (steps - 1)
        positions = (seq_lens.long()[:, None] * 3 + torch.arange(queries)).where(seq_lens[:, None] > 0, 0)
        yield (
            torch.tensor([at]), whole(0, 99, 3, width), whole(0, width, 3, width, seed=1),
            noise(3, queries if at else 1, 70), seq_lens, torch.full((3, queries), 77),
            torch.full((3, queries, 70), torch.inf), positions, torch.full((3, queries), 77),
        )  # fmt: skip


@op("spec_decode::move_accepted_kv")
def move_accepted_kv():
    slots = torch.randperm(36, generator=torch.Generator().manual_seed(0)).view(4, 9)
    slots[0, 3], slots[1, 2] = -1, 36
    path = torch.tensor([[3, 4, 8], [1, 5, 6], [2, 3, 4], [7, -1, -1]])
    for value_dim in (8, 12):
        yield noise(9, 2, 4, 8).transpose(1, 2), noise(9, 2, 4, value_dim, seed=1).transpose(1, 2), slots, path
