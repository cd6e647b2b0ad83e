"""Kernels of verification and of what stands around it, against the torch formula of their ops."""

import math

import pytest
import torch

from builders.kernels.triton_runtime import torch_implementations
from spec_decode.sampling.kernels.draw_tokens import draw_tokens
from spec_decode.sampling.kernels.process_logits import process_logits
from spec_decode.sampling.parameters import Sampling
from spec_decode.verification import verifier
from spec_decode.verification.kernels.block_verify import block_verify
from spec_decode.verification.kernels.draft_round import DraftRound
from spec_decode.verification.kernels.hash_seeds import hash_seeds
from spec_decode.verification.kernels.rejection_sample import rejection_sample
from spec_decode.verification.kernels.synthetic_accept import synthetic_accept

JUDGES = {"rejection": rejection_sample, "block": block_verify}
ROWS = 10
SHAPES = [(1, 9), (2, 2), (3, 9), (5, 37), (1, 1100), (3, 1600)]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that a launch allocates holds garbage, which must reach no output."""
    empty = torch.empty

    def poison(*shape, dtype=torch.float32, **options):
        return empty(*shape, dtype=dtype, **options).fill_(math.nan if dtype.is_floating_point else -(2**30))

    monkeypatch.setattr(torch, "empty", poison)


def both_ways(call):
    by_kernel = call()
    with torch_implementations():
        return by_kernel, call()


def same(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def generator(seed):
    return torch.Generator().manual_seed(seed)


def whole(low, high, rows, seed):
    return torch.randint(low, high, (rows,), generator=generator(seed))


def make_round(steps, vocab, seed=0, likeness=0.5, ends=True):
    """Hot and greedy rows of every kind; drafts that agree often, whole, cut short and empty, NaN behind their end."""
    p = torch.randn(ROWS, steps + 1, vocab, generator=generator(seed)) * 3
    q = p[:, :steps] + (1 - likeness) * 2 * torch.randn(ROWS, steps, vocab, generator=generator(seed + 1))
    drafts = torch.where(torch.arange(ROWS)[:, None] % 3 > 0, q.argmax(-1), p[:, :steps].argmax(-1))
    if ends:
        behind = torch.arange(steps) >= whole(0, 2 * steps + 1, ROWS, seed + 2)[:, None]
        q = q.masked_fill(behind[..., None], math.nan)
        p = torch.cat([p[:, :1], p[:, 1:].masked_fill(behind[..., None], math.nan)], 1)
        # What stands behind the first -1 is no token of the vocabulary.
        drafts = drafts.masked_fill(behind, 2**40).masked_fill(behind & (behind.long().cumsum(1) == 1), -1)
    return DraftRound(
        processed=p,
        draft_tokens=drafts,
        draft_logits=q,
        temperature=(torch.rand(ROWS, generator=generator(seed + 3)) * 2 - 0.5).clamp(min=0),
        seeds=whole(-(2**63), 2**63 - 1, ROWS, seed + 4),
        coin_seeds=whole(-(2**63), 2**63 - 1, ROWS, seed + 5),
        draft_positions=whole(0, 2**20, ROWS, seed + 6),
    )


def changed(round_, **fields):
    return DraftRound(**{name: fields.get(name, getattr(round_, name)) for name in DraftRound.__slots__})


def agrees(judge, round_):
    return same(judge(round_), by_torch(judge, round_))


def by_torch(judge, round_):
    """The formula may look at tokens behind an end, as long as they are in the vocabulary."""
    with torch_implementations():
        return judge(changed(round_, draft_tokens=round_.draft_tokens.where(round_.draft_tokens < 2**40, 0)))


@pytest.fixture(params=JUDGES)
def judge(request):
    return JUDGES[request.param]


@pytest.mark.parametrize(("steps", "vocab"), SHAPES)
def test_a_verdict_is_the_formulas(judge, steps, vocab):
    assert agrees(judge, make_round(steps, vocab, 10 * steps))


def test_the_rounds_above_hold_verdicts_of_every_kind(judge):
    counts = {"refused hot": 0, "refused greedy": 0, "kept whole hot": 0, "kept whole greedy": 0, "ended": 0}
    for steps, vocab in SHAPES:
        round_ = make_round(steps, vocab, 10 * steps)
        accepted, length = by_torch(judge, round_)[0], (round_.draft_tokens >= 0).long().cumprod(1).sum(1)
        for row in range(ROWS):
            kind = "hot" if round_.temperature[row] > 0 else "greedy"
            if accepted[row] < length[row]:
                counts[f"refused {kind}"] += 1
            else:
                counts["ended" if length[row] < steps else f"kept whole {kind}"] += 1
    assert min(counts.values()) > 0, counts


@pytest.mark.parametrize("seed", range(2))
def test_a_draft_that_lacks_tokens_and_a_target_that_may_not_say_all(judge, seed):
    round_ = make_round(2, 600, seed, ends=False)
    lacking = torch.arange(600) % 3 == 0
    unsaid = torch.arange(600) >= 515  # a whole block of -inf at the end of p
    drafts = round_.draft_tokens
    drafts = torch.where(drafts % 3 == 0, drafts + 1, drafts)
    round_ = changed(
        round_, draft_tokens=drafts, draft_logits=round_.draft_logits.masked_fill(lacking, -math.inf),
        processed=round_.processed.masked_fill(unsaid, -math.inf),
    )  # fmt: skip
    assert agrees(judge, round_) and by_torch(judge, round_)[1].lt(515).all()


def test_a_draft_of_the_targets_own_distribution_is_kept(judge):
    round_ = make_round(2, 520, likeness=1.0, ends=False)
    hot = changed(round_, temperature=torch.ones(ROWS), draft_tokens=round_.draft_logits.argmax(-1))
    assert judge(hot)[0].eq(2).all()


def test_where_nothing_is_left_of_p_it_is_drawn_from_itself(judge):
    round_ = make_round(1, 700, ends=False)
    # Neither model can say token 3, so it is refused, and p is q.
    p = round_.processed.index_fill(2, torch.tensor([3]), -math.inf)
    round_ = changed(
        round_, processed=p, draft_logits=p[:, :1], draft_tokens=torch.full((ROWS, 1), 3), temperature=torch.ones(ROWS)
    )
    accepted, next_tokens = judge(round_)
    plain = draw_tokens(
        p[:, 0], temperature=torch.ones(ROWS), seeds=round_.seeds, positions=round_.draft_positions
    )  # fmt: skip
    assert accepted.eq(0).all() and torch.equal(next_tokens, plain)


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "vocab", "seed"), [(6, 5, 40), (6, 40, 10)])
def test_flat_distributions_where_weights_of_long_prefixes_decide_the_draw(judge, steps, vocab, seed):
    round_ = make_round(steps, vocab, seed, likeness=0.0, ends=False)
    flat = {"processed": round_.processed / 3, "draft_logits": round_.draft_logits / 3}
    assert agrees(judge, changed(round_, **flat, temperature=torch.ones(ROWS)))


@pytest.mark.parametrize("drafted", [0, 1, 2])
def test_behind_a_draft_that_ended_the_token_is_plain_decodings(judge, drafted):
    # Token 2 is the likeliest of both models and more so of the draft's: no residual would hold it.
    columns = torch.arange(3)[:, None]
    p = torch.zeros(ROWS, 3, 6).masked_fill((columns == drafted) & (torch.arange(6) == 2), 2.0)
    q = torch.where(columns[:2] == drafted, 8.0 * (torch.arange(6) == 2), 0.0).expand(ROWS, -1, -1)
    round_ = changed(
        make_round(2, 6), processed=p, draft_logits=q, temperature=torch.ones(ROWS),
        draft_tokens=torch.where(torch.arange(2) < drafted, 3, -1).expand(ROWS, -1).contiguous(),
    )  # fmt: skip
    accepted, next_tokens = judge(round_)
    plain = draw_tokens(
        p[:, drafted], temperature=torch.ones(ROWS), seeds=round_.seeds, positions=round_.draft_positions + drafted
    )
    assert accepted.eq(drafted).all() and torch.equal(next_tokens, plain) and plain.eq(2).any()


def test_draft_logits_that_are_a_strided_view(judge):
    round_ = make_round(2, 40)
    wide = torch.full((ROWS, 5, 80), math.nan)
    wide[:, :2, ::2] = round_.draft_logits
    assert agrees(judge, changed(round_, draft_logits=wide[:, :2, ::2]))


def test_logits_that_are_no_numbers_give_tokens_of_the_vocabulary(judge):
    round_ = make_round(2, 600, ends=False)
    nothing = changed(round_, processed=torch.full((ROWS, 3, 600), math.nan))
    accepted, next_tokens = judge(nothing)
    assert accepted.eq(0).all() and ((next_tokens >= 0) & (next_tokens < 600)).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [("rejection", torch.float32), ("block", torch.bfloat16), ("synthetic:1.5", torch.bfloat16)]
)
def test_a_whole_verifier_with_restrictions(name, dtype):
    round_ = make_round(2, 50, 7, ends=False)
    sampling = Sampling(
        temperature=round_.temperature, top_k=whole(0, 60, ROWS, 1).int(),
        top_p=torch.rand(ROWS, generator=generator(2)).mul(2).clamp(0.01, 1), seeds=round_.seeds,
    )  # fmt: skip

    def call():
        verdict = verifier(name, num_speculative_tokens=2).verify(
            round_.processed.to(dtype), round_.draft_tokens, round_.draft_logits, sampling=sampling,
            draft_positions=round_.draft_positions,
        )  # fmt: skip
        return verdict.accepted, verdict.next_tokens

    assert same(*both_ways(call))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("picked", [False, True])
@pytest.mark.parametrize("vocab", [3, 1100])
def test_processed_logits(vocab, picked, dtype):
    logits = torch.randn(4, 3, 2 * vocab, generator=generator(0)).to(dtype)[..., ::2]
    temperature, column = torch.tensor([0.0, 0.7, 1.0, 1e-3]), torch.tensor([2, 0, 1, 2])
    assert same(*both_ways(lambda: (process_logits(logits, temperature, column if picked else None),)))


@pytest.mark.parametrize("vocab", [1, 37, 512, 2000])
def test_drawn_tokens(vocab):
    logits = torch.randn(6, vocab, generator=generator(0)) * 3
    temperature = torch.tensor([0.0, 1.0, 0.5] * 2)
    seeds, positions = whole(-(2**63), 2**63 - 1, 6, 1), whole(0, 2**40, 6, 2)
    assert same(*both_ways(lambda: (draw_tokens(logits, temperature=temperature, seeds=seeds, positions=positions),)))


def test_ties_are_won_by_the_first_token_across_blocks():
    logits = torch.zeros(1, 5000)
    logits[0, [700, 4000]] = 1.0
    zero = torch.zeros(1, dtype=torch.int64)
    assert draw_tokens(logits, temperature=torch.zeros(1), seeds=zero, positions=zero).tolist() == [700]


@pytest.mark.parametrize("mean", [0.0, 0.4, 1.0, 1.5, 3.0])
@pytest.mark.parametrize("steps", [1, 3])
def test_kept_counts(steps, mean):
    drafts = torch.zeros(40, steps, dtype=torch.int64)
    drafts[::4, -1] = -1
    seeds, positions = whole(-(2**63), 2**63 - 1, 40, 1), whole(0, 2**40, 40, 2)
    assert same(*both_ways(lambda: synthetic_accept(drafts, seeds=seeds, draft_positions=positions, mean=mean)))


@pytest.mark.parametrize("rows", [1, 300])
def test_hashed_seeds(rows):
    seeds, positions = whole(-(2**63), 2**63 - 1, rows, 1), whole(0, 2**40, rows, 2)
    assert same(*both_ways(lambda: (hash_seeds(seeds, positions),)))
