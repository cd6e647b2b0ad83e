"""Kernels of verification and of the target's sampling, against the torch reference of their ops."""

import math

import pytest
import torch

from builders.kernels.triton_runtime import torch_implementations
from spec_decode.sampling import Sampling
from spec_decode.sampling.kernels.draw_tokens import draw_tokens
from spec_decode.sampling.kernels.process_logits import process_logits
from spec_decode.sampling.target_sampler import process_target_logits, sample_target
from spec_decode.verification import verifier
from spec_decode.verification.kernels.block_verify import block_verify
from spec_decode.verification.kernels.rejection_sample import rejection_sample
from spec_decode.verification.kernels.verify_arguments import VerifyArguments
from tests.spec_decode.verification.verify_oracle import Case, block_oracle, rejection_oracle

OPS = {"rejection": rejection_sample, "block": block_verify}
ROWS = 10
SHAPES = [(1, 9), (2, 2), (3, 9), (5, 37), (2, 1100), (3, 1600)]


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


def make_arguments(steps, vocab, seed=0, likeness=0.5, ends=True):
    """Random and greedy rows; drafts that agree often, whole, cut short and empty, with NaN after their end."""
    p = torch.randn(ROWS, steps + 1, vocab, generator=generator(seed)) * 3
    q = p[:, :steps] + (1 - likeness) * 2 * torch.randn(ROWS, steps, vocab, generator=generator(seed + 1))
    drafts = torch.where(torch.arange(ROWS)[:, None] % 3 > 0, q.argmax(-1), p[:, :steps].argmax(-1))
    if ends:
        after = torch.arange(steps) >= whole(0, 2 * steps + 1, ROWS, seed + 2)[:, None]
        q = q.masked_fill(after[..., None], math.nan)
        p = torch.cat([p[:, :1], p[:, 1:].masked_fill(after[..., None], math.nan)], 1)
        # What follows the first -1 is no token of the vocabulary.
        drafts = drafts.masked_fill(after, 2**40).masked_fill(after & (after.long().cumsum(1) == 1), -1)
    return VerifyArguments(
        processed=p,
        draft_tokens=drafts,
        draft_logits=q,
        temperature=(torch.rand(ROWS, generator=generator(seed + 3)) * 2 - 0.5).clamp(min=0),
        seeds=whole(-(2**63), 2**63 - 1, ROWS, seed + 4),
        accept_seeds=whole(-(2**63), 2**63 - 1, ROWS, seed + 5),
        draft_positions=whole(0, 2**20, ROWS, seed + 6),
    )


def agrees(op, arguments):
    return same(op(arguments), by_torch(op, arguments))


def by_torch(op, arguments):
    """The reference may look at tokens after an end, as long as they are in the vocabulary."""
    with torch_implementations():
        return op(arguments._replace(draft_tokens=arguments.draft_tokens.where(arguments.draft_tokens < 2**40, 0)))


@pytest.fixture(params=OPS)
def op(request):
    return lambda arguments: OPS[request.param](*arguments.checked())


@pytest.mark.parametrize(("steps", "vocab"), SHAPES)
def test_the_output_is_the_references(op, steps, vocab):
    assert agrees(op, make_arguments(steps, vocab, 10 * steps))


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_single_token_of_a_single_request_over_several_blocks(op, temperature, row):
    arguments = VerifyArguments(*(field[row : row + 1] for field in make_arguments(1, 1600, ends=False)))
    assert agrees(op, arguments._replace(temperature=torch.tensor([temperature])))


def test_a_column_has_the_argmax_of_its_own_blocks_though_the_next_one_has_larger_logits(op):
    drawn = make_arguments(2, 1100, ends=False)
    processed = drawn.processed.abs() * torch.tensor([1.0, 100.0, 100.0])[:, None]
    drafts, greedy = processed[:, :2].argmax(-1), torch.zeros(ROWS)
    accepted = op(drawn._replace(processed=processed, draft_tokens=drafts, temperature=greedy))[0]
    assert accepted.tolist() == [2] * ROWS


def test_the_arguments_above_give_outputs_of_every_kind(op):
    counts = {
        "rejected random": 0,
        "rejected greedy": 0,
        "accepted whole random": 0,
        "accepted whole greedy": 0,
        "ended": 0,
    }
    for steps, vocab in SHAPES:
        arguments = make_arguments(steps, vocab, 10 * steps)
        accepted, length = by_torch(op, arguments)[0], (arguments.draft_tokens >= 0).long().cumprod(1).sum(1)
        for row in range(ROWS):
            kind = "random" if arguments.temperature[row] > 0 else "greedy"
            if accepted[row] < length[row]:
                counts[f"rejected {kind}"] += 1
            else:
                counts["ended" if length[row] < steps else f"accepted whole {kind}"] += 1
    assert min(counts.values()) > 0, counts


def test_a_draft_that_lacks_tokens_and_a_target_that_may_not_produce_all(op):
    arguments = make_arguments(2, 600, ends=False)
    lacking = torch.arange(600) % 3 == 0
    impossible = torch.arange(600) >= 515  # a whole block of -inf at the end of p
    drafts = arguments.draft_tokens
    drafts = torch.where(drafts % 3 == 0, drafts + 1, drafts)
    arguments = arguments._replace(
        draft_tokens=drafts, draft_logits=arguments.draft_logits.masked_fill(lacking, -math.inf),
        processed=arguments.processed.masked_fill(impossible, -math.inf),
    )  # fmt: skip
    assert agrees(op, arguments) and by_torch(op, arguments)[1].lt(515).all()


def test_a_draft_of_the_targets_own_distribution_is_accepted(op):
    arguments = make_arguments(2, 520, likeness=1.0, ends=False)
    random = arguments._replace(temperature=torch.ones(ROWS), draft_tokens=arguments.draft_logits.argmax(-1))
    assert op(random)[0].eq(2).all()


def test_where_the_residual_is_empty_p_is_drawn_from(op):
    arguments = make_arguments(1, 700, ends=False)
    # Neither model can produce token 3, so it is rejected, and p is q.
    p = arguments.processed.index_fill(2, torch.tensor([3]), -math.inf)
    arguments = arguments._replace(
        processed=p,
        draft_logits=p[:, :1],
        draft_tokens=torch.full((ROWS, 1), 3),
        temperature=torch.ones(ROWS),
    )
    accepted, next_tokens = op(arguments)
    plain = draw_tokens(p[:, 0].contiguous(), torch.ones(ROWS), arguments.seeds, arguments.draft_positions)
    assert accepted.eq(0).all() and torch.equal(next_tokens, plain)


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "vocab", "seed"), [(6, 5, 40), (6, 40, 10)])
def test_flat_distributions_where_weights_of_long_prefixes_decide_the_draw(op, steps, vocab, seed):
    arguments = make_arguments(steps, vocab, seed, likeness=0.0, ends=False)
    flat = {"processed": arguments.processed / 3, "draft_logits": arguments.draft_logits / 3}
    assert agrees(op, arguments._replace(**flat, temperature=torch.ones(ROWS)))


@pytest.mark.parametrize("drafted", [0, 1, 2])
def test_after_a_draft_that_ended_the_token_is_plain_decodings(op, drafted):
    # Token 2 is the likeliest of both models and more so of the draft's: no residual would hold it.
    columns = torch.arange(3)[:, None]
    p = torch.zeros(ROWS, 3, 6).masked_fill((columns == drafted) & (torch.arange(6) == 2), 2.0)
    q = torch.where(columns[:2] == drafted, 8.0 * (torch.arange(6) == 2), 0.0).expand(ROWS, -1, -1)
    arguments = make_arguments(2, 6)._replace(
        processed=p, draft_logits=q, temperature=torch.ones(ROWS),
        draft_tokens=torch.where(torch.arange(2) < drafted, 3, -1).expand(ROWS, -1).contiguous(),
    )  # fmt: skip
    accepted, next_tokens = op(arguments)
    plain = draw_tokens(
        p[:, drafted].contiguous(), torch.ones(ROWS), arguments.seeds, arguments.draft_positions + drafted
    )
    assert accepted.eq(drafted).all() and torch.equal(next_tokens, plain) and plain.eq(2).any()


def test_draft_logits_that_are_a_strided_view(op):
    arguments = make_arguments(2, 40)
    wide = torch.full((ROWS, 5, 80), math.nan)
    wide[:, :2, ::2] = arguments.draft_logits
    assert agrees(op, arguments._replace(draft_logits=wide[:, :2, ::2]))


def test_where_the_targets_logits_are_no_numbers_no_draft_is_kept(op):
    arguments = make_arguments(2, 600, ends=False)
    accepted, next_tokens = op(arguments._replace(processed=torch.full((ROWS, 3, 600), math.nan)))
    assert accepted.eq(0).all() and ((next_tokens >= 0) & (next_tokens < 600)).all()


def test_a_random_draft_by_logits_that_are_no_numbers_is_not_kept(op):
    arguments = make_arguments(2, 600, ends=False)
    nothing = arguments._replace(draft_logits=torch.full((ROWS, 2, 600), math.nan), temperature=torch.ones(ROWS))
    accepted, next_tokens = op(nothing)
    assert accepted.eq(0).all() and ((next_tokens >= 0) & (next_tokens < 600)).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [("rejection", torch.float32), ("block", torch.bfloat16), ("synthetic:1.5", torch.bfloat16)]
)
def test_a_whole_verifier_with_restrictions(name, dtype):
    arguments = make_arguments(2, 50, 7, ends=False)
    sampling = Sampling(
        temperature=arguments.temperature, top_k=whole(0, 60, ROWS, 1).int(),
        top_p=torch.rand(ROWS, generator=generator(2)).mul(2).clamp(0.01, 1), seeds=arguments.seeds,
    )  # fmt: skip

    def call():
        output = verifier(name, num_speculative_tokens=2).verify(
            arguments.processed.to(dtype), arguments.draft_tokens, arguments.draft_logits, sampling=sampling,
            draft_positions=arguments.draft_positions,
        )  # fmt: skip
        return output.accepted, output.next_tokens

    assert same(*both_ways(call))


def test_only_rows_that_are_restricted_are_processed():
    logits, top_p = torch.randn(5, 2, 40, generator=generator(0)), torch.tensor([1.0, 1, 0.5, 1, 1])
    top_k = torch.tensor([0, 3, 0, 40, 39], dtype=torch.int32)

    def call():
        out = process_logits(logits, torch.full((5,), 2.0), None, top_k, top_p)
        return (out[[1, 2, 4]],)

    assert same(*both_ways(call)) and torch.equal(call()[0], logits[[1, 2, 4]] / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("selected", [False, True])
@pytest.mark.parametrize("vocab", [37, 2000])
def test_the_targets_tokens(vocab, selected, dtype):
    logits = (torch.randn(6, 3, 2 * vocab, generator=generator(0)) * 3).to(dtype)[..., ::2]
    sampling = Sampling(
        temperature=torch.tensor([0.0, 1.0, 0.5] * 2), top_k=torch.tensor([0, 0, vocab, 5, 0, 7], dtype=torch.int32),
        top_p=torch.tensor([1.0, 1, 1, 1, 0.5, 0.5]), seeds=whole(-(2**63), 2**63 - 1, 6, 1),
    )  # fmt: skip
    positions, column = whole(0, 2**40, 6, 2), torch.tensor([2, 0, 1] * 2)

    def call():
        if selected:
            return (sample_target(logits, sampling=sampling, positions=positions, column=column),)
        return (sample_target(logits[:, 0], sampling=sampling, positions=positions),)

    picked = logits[torch.arange(6), column if selected else 0][:, None].contiguous()
    processed = process_target_logits(picked, sampling)[:, 0]
    assert same(*both_ways(call))
    assert torch.equal(call()[0], draw_tokens(processed, sampling.temperature, sampling.seeds, positions))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_beyond_the_vocabulary_is_not_drawn(temperature):
    wide = torch.full((3, 601), math.inf)
    wide[:, :600] = torch.randn(3, 600, generator=generator(0))
    logits, zeros = wide[:, :600], torch.zeros(3, dtype=torch.int64)
    sampling = Sampling(torch.full((3,), temperature), zeros.int(), torch.ones(3), zeros)
    found = sample_target(logits, sampling=sampling, positions=zeros)
    assert torch.equal(found, sample_target(logits.contiguous(), sampling=sampling, positions=zeros))
    assert found.lt(599).all()


def test_ties_are_won_by_the_first_token_across_blocks():
    logits = torch.zeros(1, 5000)
    logits[0, [700, 4000]] = 1.0
    zero = torch.zeros(1, dtype=torch.int64)
    assert draw_tokens(logits, torch.zeros(1), zero, zero).tolist() == [700]


ORACLES = {"rejection": rejection_oracle, "block": block_oracle}


@pytest.mark.parametrize("name", OPS)
def test_every_output_is_what_the_noise_says(name):
    case = Case(1)
    case.check(OPS[name], ORACLES[name], torch.arange(len(case.rows)), "cpu", 1e-5)
