"""Samples of the ops of sampling, verification and trees."""

import torch

import spec_decode.sampling.kernels.select_candidates  # noqa: F401
from builders.kernels.triton_runtime import torch_implementations
from spec_decode.trees import DraftTree, DynamicTree, DynamicTreeConfig
from spec_decode.verification.kernels.verify_arguments import VerifyArguments
from tests.ops.sample import CLOSE, each, int32, noise, op, whole

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def seeds(rows, seed=1):
    return whole(-(2**63), 2**63 - 1, rows, seed=seed)


def ties(vocab, *best):
    """Return logits with two equal maxima each; the first must win."""
    logits = torch.zeros(len(best), vocab)
    for row, tokens in zip(logits, best, strict=True):
        row[[*tokens]] = 1.0
    return logits


def without_distribution(*shape):
    """Yield logits [..., V] whose middle column defines no distribution, in each way, also by a single logit."""
    for value, at in ((torch.nan, 600), (torch.inf, 1), (torch.nan, slice(None)), (-torch.inf, slice(None))):
        logits = noise(*shape)
        logits[:, 1, at] = value
        yield logits


def biased(vocab):
    """Return the biases of four rows: of ends before, between and after positions, of a token twice, and none."""
    counts = int32(3, 0, 1, 4)
    tokens = whole(0, vocab, 4, 5).int()
    tokens[3, :4] = int32(0, vocab - 1, 0, vocab // 2)
    values = noise(4, 5)
    values[0, 1] = values[3, 1] = -torch.inf
    return counts, tokens, values, whole(90, 110, 4, 5)


def penalties_of(vocab):
    """Return penalties of four rows, the second without any, and counts, which are not read for that row."""
    penalties = torch.tensor([[1.3, 0.5, -0.25], [1.0, 0.0, 0.0], [0.5, 0.0, 0.0], [1.0, 0.0, 1.5]])
    return penalties, whole(-4, 6, 4, vocab, seed=7).clamp(min=0).int()


@op("spec_decode::process_logits", strided="logits")
def process_logits():
    for vocab, dtype, column in each((1100, 3), DTYPES, (None, torch.tensor([2, 0, 1, 2]))):
        temperature = torch.tensor([0.0, 0.7, 1.0, 1e-3])
        plain = noise(4, 3, vocab, dtype=dtype), temperature, column, *[None] * 4
        yield *plain, *[None] * 9
        edits, drafts = (*biased(vocab), *penalties_of(vocab)), whole(0, 2, 4, 2, seed=3)
        for first in (0, 99, 200):
            yield *plain, torch.arange(first, first + 4), *edits, drafts, None
        if column is None:
            places, parents = whole(90, 110, 4, 3), torch.tensor([[0, 1], [0, 0], [0, 0], [0, -1]])
            yield *plain, places, *edits, drafts, parents
            yield *plain, places, *edits, drafts.index_fill(1, torch.tensor([1]), -1), None
    yield noise(4, 3, 80)[..., ::2], torch.ones(4), *[None] * 14
    # Some rows are unchanged, hence not written.
    k, p, m = int32(2, 0, 39, 0, 40, 41), torch.tensor([1, 0.5, 1, 1, 1, 1]), torch.tensor([0, 0, 0, 0, 1, 0.0]).log()
    temperature, flags = torch.full((6,), 2.0), torch.tensor([True, False] * 3)
    yield noise(6, 3, 40), temperature, None, k, p, m, flags, *[None] * 9
    some = noise(4, 3, 40), temperature[:4], None, k[2:], p[2:], m[2:], flags[:4]
    yield *some, torch.arange(98, 102), *biased(40), *penalties_of(40), whole(0, 40, 4, 2), None


@op("spec_decode::draw_target", strided="logits")
def draw_target():
    for vocab, dtype, column in each((37, 1, 512, 2000), DTYPES[:2], (torch.tensor([2, 0, 1] * 2), None)):
        columns = 3 if column is None else 1
        yield (
            noise(6, 3, vocab, dtype=dtype), noise(6, columns, vocab, seed=1),
            torch.tensor([False, False, False, True, True, True]), torch.tensor([0.0, 1.0, 0.5] * 2), seeds(6),
            whole(0, 2**40, 6, columns, seed=2), column,
        )  # fmt: skip
    for logits in without_distribution(2, 3, 1100):
        yield (
            logits, logits.clone(), torch.tensor([False, True]), torch.tensor([0.0, 1.0]), seeds(2),
            whole(0, 2**40, 2, 3, seed=2), None,
        )  # fmt: skip
    zero = torch.zeros(1, dtype=torch.int64)
    logits = ties(5000, (700, 4000))[:, None]
    yield logits, torch.zeros_like(logits), zero.bool(), torch.zeros(1), zero, zero, None


def by_top_k_and_top_p():
    for vocab in (37, 1, 2, 1000, 9001):
        yield noise(4, vocab), int32(5, 0, 5, 0), torch.tensor([1.0, 0.9, 0.8, 1.0])
    # So many in the window that registers do not hold them at once
    yield noise(2, 40000), int32(20000, 0), torch.tensor([1.0, 0.9])
    yield noise(6, 100), int32(3, 0, 0), torch.tensor([1.0, 0.5, 1.0])
    yield noise(7, 300), int32(1, 2, 50, 299, 300, 301, 2**31 - 1), torch.ones(7)
    for scale in (0.01, 1.0, 10.0):
        rows = (noise(1, 300) * scale).repeat(5, 1)
        yield rows, int32(*[0] * 5), torch.tensor([1e-30, 0.01, 0.5, 0.9, 0.999])
    for seed in range(4):
        yield noise(3, 300, seed=seed), int32(2, 20, 200), torch.tensor([0.5, 0.9, 0.97])
    for scale in (1.0, 2.0, 4.0):
        yield (noise(3, 400) * scale).round() / scale, int32(40, 0, 40), torch.tensor([1.0, 0.8, 0.8])
    yield torch.full((2, 70), -2.5), int32(3, 0), torch.tensor([1.0, 0.2])
    powers = torch.cat([2.0 ** torch.arange(-140, 127), -(2.0 ** torch.arange(-140, 127)), torch.tensor([0.0, -0.0])])
    powers = powers[torch.randperm(len(powers), generator=torch.Generator().manual_seed(0))]
    yield powers.repeat(3, 1), int32(9, 268, 500), torch.ones(3)
    some_out = noise(3, 100).masked_fill(torch.arange(100) % 3 == 0, -torch.inf)
    yield some_out, int32(10, 90, 0), torch.tensor([1.0, 1.0, 0.9])
    yield torch.full((2, 50), torch.nan), int32(0, 50), torch.ones(2)


@op("spec_decode::restrict_logits")
def restrict_logits():
    for logits, top_k, top_p in by_top_k_and_top_p():
        yield logits, top_k, top_p, torch.full(top_p.shape, -torch.inf)
    for vocab in (37, 1, 1000, 9001):
        yield noise(6, vocab), int32(0, 0, 5), torch.tensor([1.0, 0.8, 0.8]), torch.tensor([0.05, 0.02, 0.1]).log()
        yield noise(3, vocab), int32(5, 0, 0), torch.ones(3), torch.tensor([0.5, 0.0, 1.0]).log()


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


def candidates_of(lines, vocab, width, twice=0):
    """Return candidates for each line; the last `twice` are repeated tokens."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.stack([torch.randperm(vocab, generator=generator)[:width] for _ in range(lines)])
    tokens[:, width - twice :] = tokens[:, :1]
    return tokens


@op("spec_decode::select_candidates", close=CLOSE, strided="logits gates")
def select_candidates():
    for columns, (vocab, width, twice), rank, confidence, dtype in each(
        (4, 1, 7), ((37, 5, 0), (9, 9, 2), (600, 1, 0), (40, 16, 3)), (6, 1, 300), (0.0, 0.4), DTYPES[:2]
    ):
        lines = 4 * columns
        logits, scored = noise(lines, vocab, dtype=dtype), candidates_of(5 * columns, vocab, width)
        # Some are no candidates.
        logits[:, ::5] = -torch.inf
        yield (
            logits, candidates_of(lines, vocab, width, twice),
            noise(lines, rank, seed=1, dtype=dtype), noise(vocab, rank, seed=2, dtype=dtype),
            noise(vocab, rank, seed=3, dtype=dtype), whole(0, vocab, 5), torch.tensor([0.0, 0.7, 1.0, 0.0]), seeds(4),
            whole(0, 2**20, lines), int32(5, 5, 5, 0), torch.full((5, columns), 7),
            torch.full((5, columns, vocab), 7.0), scored.view(5, columns, width).flip(0), int32(9, 9, columns - 1, 9),
            int32(columns), torch.tensor([confidence]),
        )  # fmt: skip


def draft(logits, temperature, live, *, column=1, lens=None, confidence=0.0, token_map=None, hidden=None):
    """Return arguments on buffers that hold 7s, with room for one more row."""
    rows, vocab = logits.shape
    return (
        logits, torch.tensor(temperature), seeds(rows), whole(0, 2**20, rows), int32(*live), torch.tensor([column]),
        torch.full((rows + 1, 3), 7), torch.full((rows + 1, 3, vocab if token_map is None else 2 * vocab), 7.0),
        torch.full((rows + 1,), 7), int32(*lens or [3] * rows), int32(3), torch.tensor([confidence]), int32(7),
        token_map, hidden, None if hidden is None else torch.full_like(hidden, 7.0),
    )  # fmt: skip


@op("spec_decode::sample_draft", strided="logits hidden")
def sample_draft():
    widths = None, *(noise(3, width) for width in (24, 1, 1000))
    for vocab, column, confidence, hidden, dtype in each((37, 2, 4100, 9001), (1, 0, 2, 3), (0.0, 0.5), widths, DTYPES):
        some = torch.randperm(2 * vocab, generator=torch.Generator().manual_seed(0))[:vocab].sort().values
        for token_map in (None, some):
            yield draft(
                noise(3, vocab, dtype=dtype), [0.0, 1.0, 0.5], [3, 4, 0], column=column, lens=[2, 1, 3],
                confidence=confidence, token_map=token_map, hidden=hidden,
            )  # fmt: skip
    yield draft(ties(9001, (4100, 8200), (5, 4099)), [0.0, 0.0], [5, 5])
    for column in range(3):
        yield draft(noise(5, 50) * 1.5, [0.0, 1.0, 1.0, 0.5, 1.0], [5] * 5, column=column, lens=[0, 1, 2, 3, 9])
    for vocab in (7, 9001):
        logits = noise(6, vocab) * 1.5
        logits[::2, 3] += 12
        logits[1::2] *= 0.1
        logits[1, 4096:] = -torch.inf
        yield draft(logits, [0.0, 0.7, 1.0, 0.0, 1.9, 1.0], [5] * 6, confidence=0.5)
    for minimum in (0.5, 0.5 + 2**-24):
        yield draft(torch.zeros(1, 2), [0.0], [5], confidence=minimum)


def verify_arguments(steps, vocab, seed=0, likeness=0.5, ends=True):
    """Return random and greedy rows; drafts that often agree, whole, cut short and empty, with NaN after their end."""
    p = noise(10, steps + 1, vocab, seed=seed) * 1.5
    q = p[:, :steps] + (1 - likeness) * noise(10, steps, vocab, seed=seed + 1)
    drafts = torch.where(torch.arange(10)[:, None] % 3 > 0, q.argmax(-1), p[:, :steps].argmax(-1))
    if ends:
        after = torch.arange(steps) >= whole(0, 2 * steps + 1, 10, 1, seed=seed + 2)
        q = q.masked_fill(after[..., None], torch.nan)
        p = torch.cat([p[:, :1], p[:, 1:].masked_fill(after[..., None], torch.nan)], 1)
        # After the first -1 there is no valid token.
        drafts = drafts.masked_fill(after, 2**40).masked_fill(after & (after.long().cumsum(1) == 1), -1)
    temperature = (torch.rand(10, generator=torch.Generator().manual_seed(seed + 3)) * 2 - 0.5).clamp(min=0)
    numbers = seeds(10, seed + 4), seeds(10, seed + 5), whole(0, 2**20, 10, seed=seed + 6)
    return VerifyArguments(p, drafts, q, temperature, *numbers)


SHAPES = [(1, 9), (2, 2), (3, 9), (5, 37), (2, 1100), (3, 1600)]
"""Draft tokens and vocabulary."""


def verified():
    for steps, vocab in SHAPES:
        yield verify_arguments(steps, vocab, 10 * steps).checked()
    alone = verify_arguments(1, 1600, ends=False)
    for row, temperature in ((0, 0.0), (1, 0.0), (0, 1.0), (1, 1.0)):
        yield VerifyArguments(*(f[row : row + 1] for f in alone))._replace(temperature=torch.tensor([temperature]))
    long, warm = verify_arguments(2, 600, ends=False), torch.ones(10)
    # A draft without some tokens, and a target that cannot produce all: a whole block of -inf at the end of p.
    lacks, impossible = torch.arange(600) % 3 == 0, torch.arange(600) >= 515
    yield long._replace(
        draft_tokens=long.draft_tokens + (long.draft_tokens % 3 == 0),
        draft_logits=long.draft_logits.masked_fill(lacks, -torch.inf),
        processed=long.processed.masked_fill(impossible, -torch.inf),
    )
    # Greedy, with larger logits in each later column.
    p = long.processed.abs() * torch.tensor([1.0, 100.0, 100.0])[:, None]
    yield long._replace(processed=p, draft_tokens=p[:, :2].argmax(-1), temperature=warm * 0)
    for p in without_distribution(10, 3, 1100):
        likely = p[:, :2].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        # The draft is surer than the target: weights of block verification are below 1.
        yield VerifyArguments(p, likely.argmax(-1), likely + likely, torch.arange(10) % 2 * 1.0, *long[4:])
    same = verify_arguments(2, 520, likeness=1.0, ends=False)
    yield same._replace(temperature=warm, draft_tokens=same.draft_logits.argmax(-1))
    # Neither model can produce token 3, so it is rejected, and p is q.
    p = long.processed.index_fill(2, torch.tensor([3]), -torch.inf)
    yield long._replace(
        processed=p, draft_logits=p[:, :2], draft_tokens=torch.full_like(long.draft_tokens, 3), temperature=warm
    )
    for drafted in range(3):
        # Token 2 is the likeliest in both models, and more so in the draft's: no residual would contain it.
        column, two = torch.arange(3)[:, None], torch.arange(6) == 2
        yield verify_arguments(2, 6)._replace(
            processed=torch.zeros(10, 3, 6).masked_fill((column == drafted) & two, 2.0), temperature=warm,
            draft_logits=torch.where(column[:2] == drafted, 8.0 * two, 0.0).repeat(10, 1, 1),
            draft_tokens=torch.where(torch.arange(2) < drafted, 3, -1).repeat(10, 1),
        )  # fmt: skip
    wide = torch.full((10, 5, 80), torch.nan)
    wide[:, :2, ::2] = (narrow := verify_arguments(2, 40)).draft_logits
    yield narrow._replace(draft_logits=wide[:, :2, ::2])
    # Flat, so that weights of long prefixes decide the draw.
    for vocab, seed in ((5, 40), (40, 10)):
        flat = verify_arguments(6, vocab, seed, likeness=0.0, ends=False)
        flat = VerifyArguments(*(field[:5] for field in flat))
        yield flat._replace(processed=flat.processed / 3, draft_logits=flat.draft_logits / 3, temperature=warm[:5])


op("spec_decode::rejection_sample", strided="draft_logits")(verified)
op("spec_decode::block_verify", strided="draft_logits")(verified)


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


def random_parents(tokens, seed):
    """Return trees of every shape with up to three children per token, some of which end early."""
    parents = torch.zeros(8, tokens, dtype=torch.int64)
    for row in range(8):
        free = [3] * (1 + tokens)
        for token in range(tokens):
            allowed = [at for at in range(token + 1) if free[at]]
            parent = allowed[int(whole(0, len(allowed), 1, seed=1000 * seed + 100 * row + token))]
            free[parent] -= 1
            parents[row, token] = parent
    length = whole(0, 2 * tokens, 8, 1, seed=seed)
    parents = parents.where(torch.arange(tokens) < length, -1)
    # After the first -1 there is no tree.
    return parents.where(torch.arange(tokens) <= length, 2**40)


@op("spec_decode::ancestor_masks")
def ancestor_masks():
    yield (torch.tensor([[0, 1, -1], [0, 0, 2]]),)
    for tokens in (1, 2, 7, 31, 63):
        yield (DraftTree.chain(tokens).rows(2, "cpu"),)
        yield (random_parents(tokens, tokens),)


@op("spec_decode::follow_tree")
def follow_tree():
    for tokens in (5, 1, 32, 63):
        parents = random_parents(tokens, tokens)
        for depth in (4, 1, tokens):
            yield whole(-1, 3, 8, tokens, seed=1), parents, whole(-1, 3, 8, 1 + tokens, seed=2), depth


@op("spec_decode::top_children", close=CLOSE)
def top_children():
    for vocab, width in ((40, 3), (4, 4), (1300, 8), (9000, 2)):
        yield noise(3, vocab), width, None
        yield noise(3, vocab).round(), width, torch.tensor([1.0, 0.3, 1.7])


@op("spec_decode::best_paths")
def best_paths():
    for places, width, count in ((4, 3, 12), (1, 1, 1), (7, 8, 20), (3, 64, 32), (16, 2, 63), (2, 2, 9)):
        scores = -whole(0, 4, 6, places, width, seed=places).float().sort(2).values
        scores[1] = 0
        scores[2, :, width // 2 :] = -torch.inf
        scores[3] = -torch.inf
        # Log-probabilities of a peaked distribution, whose sums are rounded.
        scores[4] = (noise(places, width) * 4).log_softmax(-1).sort(-1, descending=True).values
        tokens = whole(0, 2**40, 6, places, width, seed=1)
        uneven = ((99, 1, places, 3, places - 1, 0), (-5, 2, 2**31 - 1, 1, 2, 1)) if count < 32 else ()
        for depths in ((places,) * 6, *uneven):
            yield tokens, scores, int32(*depths), *torch.full((2, 6, count), 7)


@op("spec_decode::grow_tree")
def grow_tree():
    for width, steps in ((2, 2), (1, 3), (3, 3), (5, 2), (33, 2)):
        config = DynamicTreeConfig(width=width, num_tokens=2)
        tree = DynamicTree(8, torch.zeros(1, dtype=torch.int64), config, num_speculative_tokens=steps)
        buffers = tree.tokens, tree.parents, tree.scores
        frontier = tree.frontier, tree.frontier_scores, tree.frontier_tokens, tree.frontier_places
        for draw, step in enumerate([*range(steps)] * 2):
            places = width if step else 1
            tokens = whole(0, 9, 8, places, width, seed=draw)
            # Scores this far apart sum without rounding, and the tree grows from what it holds.
            scores = (whole(-4, 1, 8, places, width, seed=draw).float() * 64).sort(-1, descending=True).values
            sample = torch.tensor([step]), tokens, scores, *buffers, *frontier
            yield tuple(part.clone() for part in sample)
            with torch_implementations():
                torch.ops.spec_decode.grow_tree(*sample)


@op("spec_decode::keep_best")
def keep_best():
    for candidates, count in ((20, 9), (1, 1), (20, 63), (70, 9), (130, 63)):
        parents = torch.stack([whole(-1, 10**6, candidates, seed=row) for row in range(8)])
        parents = parents.where(parents < 0, parents % torch.arange(candidates).clamp(min=1))
        parents[:, 0] = -1
        scores = torch.zeros(8, candidates)
        for at in range(candidates):
            down = -whole(0, 3, 8, seed=at).float()
            above = scores.gather(1, parents[:, at : at + 1].clamp(min=0))[:, 0]
            scores[:, at] = down + torch.where(parents[:, at] >= 0, above, 0.0)
        scores[0, candidates // 2 :] = -torch.inf
        yield whole(0, 99, 8, candidates, seed=5), parents, scores, count


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
    yield *(noise(9, 4, 2, 8, seed=seed).to(torch.float8_e4m3fn) for seed in range(2)), slots, path
