import pytest
import torch

from builders.kernels.triton_runtime import torch_implementations
from spec_decode.sampling.kernels import restrict_logits as kernel
from spec_decode.sampling.kernels.restrict_logits import restrict_logits

INF = float("inf")


def both_ways(logits, top_k, top_p, min_p=None):
    """The rows by the kernel and by its specification."""
    out = logits.clone(), logits.clone()
    asked = {
        "top_k": torch.tensor(top_k, dtype=torch.int32),
        "top_p": torch.tensor(top_p),
        "min_log_p": torch.tensor(min_p or [0.0] * len(top_k)).log(),
    }
    restrict_logits(out[0], **asked)
    with torch_implementations():
        restrict_logits(out[1], **asked)
    return out


def noise(rows, vocab, seed=0, scale=3.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("programs", [1, 8])
def test_program_handles_several_parts_of_row(monkeypatch, programs):
    monkeypatch.setattr(kernel, "_PROGRAMS", programs)
    assert torch.equal(*both_ways(noise(4, 13000), [5, 0, 5, 0], [1.0, 0.9, 0.8, 1.0]))


@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0])
def test_top_p_is_met_within_fp32_precision(scale):
    logits, top_p, grain = noise(1, 300, scale=scale), 0.999999, 1e-6
    stays = both_ways(logits, [0], [top_p])[0] > -INF
    share = logits.double().softmax(-1)
    assert share[stays].sum() >= top_p - grain and share[stays].sum() - share[stays].min() < top_p + grain
    assert logits[~stays].lt(logits[stays].min()).all()


def tiles(monkeypatch, *, part=64, sample=64, block=32, capacity=150):
    """Tiles so small that a row of a few hundred logits meets what a vocabulary does: many parts, a sample of some, and
    a window of more logits than there is room for, or than registers keep."""
    for name, value in {"_PART": part, "_SAMPLE": sample, "_BLOCK": block, "_CAPACITY": capacity}.items():
        monkeypatch.setattr(kernel, name, value)


@pytest.fixture
def narrow(monkeypatch):
    tiles(monkeypatch)


@pytest.mark.parametrize("garbage", [float("nan"), INF, -INF])
@pytest.mark.parametrize("vocab", [50, 300])
def test_garbage_row_ends_and_spares_others(narrow, vocab, garbage):
    for every in (2, 1):
        logits = noise(3, vocab)
        logits[1, ::every] = garbage
        by_kernel, by_torch = both_ways(logits, [30, 30, 0], [0.9, 0.9, 0.9])
        assert torch.equal(by_kernel[::2], by_torch[::2])


EVEN = torch.arange(320) % 2 == 0
LEAST = torch.finfo(torch.float32).min
WIDE = {
    "spread evenly": noise(1, 320)[0],
    "in order, so that lanes hold neighbours": noise(1, 320)[0].sort().values,
    "a block apart, so that the best share a lane": noise(1, 320)[0].sort().values.view(32, 10).T.reshape(-1),
    "coarse, so that ties outnumber what a lane keeps": (noise(1, 320)[0] / 2).round(),
    "two values": (torch.arange(320) % 7 == 0).float(),
    "one value": torch.full((320,), 2.5),
    "one far above the others": torch.cat([noise(1, 319)[0], torch.tensor([1e30])]),
    "one far below the others": torch.cat([noise(1, 319)[0], torch.tensor([-1e30])]),
    "a single finite one": torch.full((320,), -INF).index_fill(0, torch.tensor([237]), 1.0),
    "many masks that are no -inf": noise(1, 320)[0].masked_fill(torch.arange(320) % 3 > 0, LEAST),
    "masks of two kinds": noise(1, 320)[0].masked_fill(torch.arange(320) % 3 == 0, -1e30).masked_fill(EVEN, -INF),
    "nothing but masks": torch.full((320,), -1e30),
    "whole parts of masks": noise(1, 320)[0].masked_fill(torch.arange(320) < 256, LEAST),
    "zeros of both signs": torch.where(EVEN, 0.0, -0.0),
    "a pair of neighbours": torch.where(EVEN, 1.0, torch.tensor(1.0).nextafter(torch.tensor(2.0))),
    "from the least to the largest float": torch.linspace(-1, 1, 320) * -LEAST,
}


@pytest.mark.slow
@pytest.mark.parametrize("row", WIDE.values(), ids=WIDE)
def test_row_of_many_parts_matches_torch(narrow, row):
    restrictions = [(200, 1.0), (0, 0.95), (50, 0.9)]
    rows = row.expand(len(restrictions), -1).contiguous()
    assert torch.equal(*both_ways(rows, *map(list, zip(*restrictions, strict=True))))


@pytest.mark.slow
@pytest.mark.parametrize("row", WIDE.values(), ids=WIDE)
def test_min_p_with_every_other_restriction_matches_torch(narrow, row):
    restrictions = [(k, p, m) for k in (0, 50) for p in (1.0, 0.9, 1e-30) for m in (1.0, 0.3, 1e-3, 1e-30)]
    rows = row.expand(len(restrictions), -1).contiguous()
    by_kernel, by_torch = both_ways(rows, *map(list, zip(*restrictions, strict=True)))
    assert torch.equal(by_kernel, by_torch)


def staircase(*steps):
    """A row of logits 0 and 32, and of as many as each of `steps` (from and how many) says in a unit from there."""
    inner = [start + (i + 1) / (number + 1) for start, number in steps for i in range(number)]
    row = torch.tensor([0.0, 32.0, *inner])
    return row[torch.randperm(len(row), generator=torch.Generator().manual_seed(1))]


THRESHOLDS = {  # steps of a row, and k or p such that the threshold lies where the name says
    "top_k's in the lowest step": ([(0, 20), (20, 100)], 115, 1.0),
    "top_k's in the lowest step, at its least member": ([(0, 20), (20, 100)], 122 - 1, 1.0),
    "top_k's in the highest step": ([(31, 100), (5, 100)], 17, 1.0),
    "top_k's at the least member of its step": ([(10, 30), (20, 30)], 31, 1.0),
    "top_k's at the largest member of its step": ([(10, 30), (20, 30)], 32, 1.0),
    "top_k's in a step of one": ([(10, 60), (15, 1), (20, 60)], 62, 1.0),
    "top_k's in a step of more than there is room for": ([(10, 150), (20, 60)], 100, 1.0),
    "top_k's after an empty step": ([(10, 60), (12, 60)], 62, 1.0),
    "top_p's in the step of the largest": ([(31, 100), (5, 100)], 201, 0.5),
    "top_p's in a step of one": ([(5, 60), (30, 1)], 62, 0.9),
    "top_p's in a step of more than there is room for": ([(31, 200)], 201, 0.9),
    "top_p's at the end of a step, without top_k": ([(31, 100), (30, 100)], 0, 0.9),
    "top_p's in top_k's step": ([(31, 60), (5, 60)], 40, 0.8),
    "top_p's in another step than top_k's": ([(31, 60), (5, 60)], 100, 0.9),
    "both in a step of more than there is room for": ([(31, 200)], 150, 0.7),
    "top_p's where top_k left a single one": ([(31, 60)], 1, 0.99),
}
THRESHOLDS = {name: (staircase(*steps), *settings) for name, (steps, *settings) in THRESHOLDS.items()}
BELOW_ZEROS = torch.cat([torch.tensor([-0.0] * 3 + [-32]), torch.arange(-29, 0) / 40])
THRESHOLDS["top_k's below negative zeros"] = (BELOW_ZEROS, 10, 1.0)


@pytest.mark.parametrize(("row", "top_k", "top_p"), THRESHOLDS.values(), ids=THRESHOLDS)
def test_threshold_anywhere_among_logits_matches_torch(narrow, row, top_k, top_p):
    by_kernel, by_torch = both_ways(row[None], [top_k], [top_p])
    assert torch.equal(by_kernel, by_torch) and (by_kernel == -INF).any()


SAMPLED = torch.arange(320) % 40 < 8


def around_a_sample(*sample, rest, many):
    """A row with these logits where the sample is taken, and elsewhere `rest` this many times, then -20."""
    row = torch.full((320,), -20.0)
    row[SAMPLED] = torch.cat(sample)
    row[(~SAMPLED).nonzero()[:many, 0]] = rest
    return row + noise(1, 320)[0] / 1000


def added(amount):
    return noise(1, 320)[0] + amount * SAMPLED


MISLEADING = {
    "all that stays is in the sample, and none below": (added(100.0), 50, 1.0),
    "the sample is below all that stays": (added(-100.0), 200, 1.0),
    "the sample is below all that stays, by top_p": (added(-100.0), 0, 0.9),
    "all that stays is in the sample, by top_p": (added(100.0), 0, 0.3),
    "all that stays is in the sample, by both": (added(100.0), 50, 0.9),
    "top_p is reached above the window": (around_a_sample(torch.zeros(64), rest=2.0, many=20), 0, 0.6),
    "top_p is not reached in the window": (
        around_a_sample(torch.full((16,), 3.0), torch.full((48,), 0.1), rest=0.0, many=256),
        0,
        0.64,
    ),
}


@pytest.mark.parametrize(("row", "top_k", "top_p"), MISLEADING.values(), ids=MISLEADING)
@pytest.mark.parametrize("capacity", [150, 320])
def test_misleading_sample_changes_nothing(monkeypatch, capacity, row, top_k, top_p):
    tiles(monkeypatch, capacity=capacity)
    assert torch.equal(*both_ways(row[None], [top_k], [top_p]))


def test_many_logits_in_window_take_several_passes(monkeypatch):
    tiles(monkeypatch, sample=256, capacity=2000)
    for seed in range(4):
        assert torch.equal(*both_ways(noise(2, 3000, seed=seed), [700, 0], [1.0, 0.9]))


def test_top_p_rounded_to_end_keeps_most_probable(narrow):
    logits = noise(1, 320, scale=0.01)
    for top_p in (1 - 2**-24, 1 - 2**-23):
        out, _ = both_ways(logits, [0], [top_p])
        assert torch.equal(out > -INF, logits >= out[out > -INF].min()) and (out > -INF).sum() >= 315


def test_rounded_top_p_never_undoes_top_k(monkeypatch):
    tiles(monkeypatch, block=128, capacity=512)
    inner = torch.rand(300, generator=torch.Generator().manual_seed(1))
    logits = torch.cat([torch.tensor([0.0, 32.0]), 31 + inner]).expand(3, -1).contiguous()
    top_k = [20, 111, 230]
    by_k, _ = both_ways(logits, top_k, [1.0] * 3)
    by_both, _ = both_ways(logits, top_k, [1 - 2**-24] * 3)
    assert (by_k[by_both > -INF] > -INF).all() and ((by_both > -INF).sum(1) > 0.9 * torch.tensor(top_k)).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "other", [{"part": 16}, {"part": 512}, {"sample": 16}, {"sample": 512}, {"block": 128}, {"capacity": 1}], ids=str
)
def test_tiles_do_not_change_kept_logits(monkeypatch, other):
    rows = [noise(2, 320), [200, 0], [0.99, 0.8]]
    tiles(monkeypatch)
    first, _ = both_ways(*rows)
    tiles(monkeypatch, **other)
    assert torch.equal(both_ways(*rows)[0], first)


def test_row_in_batch_equals_row_alone(narrow):
    logits, top_k, top_p = noise(3, 320, scale=0.5), [50, 0, 200], [0.9, 0.999, 1.0]
    together, _ = both_ways(logits, top_k, top_p)
    alone = [both_ways(logits[row : row + 1], [top_k[row]], [top_p[row]])[0] for row in range(3)]
    assert torch.equal(torch.cat(alone), together)


@pytest.mark.parametrize("poison", [float("nan"), INF, 0.0], ids=str)
def test_uninitialised_scratch_is_never_read(narrow, monkeypatch, poison):
    def poisoned(shape, *, dtype, device):
        return torch.full(shape, poison if dtype.is_floating_point else 2**30, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "empty", poisoned)
    assert torch.equal(*both_ways(noise(4, 320), [50, 0, 200, 0], [1.0, 0.9, 0.8, 1.0]))
