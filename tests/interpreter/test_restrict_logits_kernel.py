import pytest
import torch

from builders._triton import torch_implementations
from spec_decode.ops import restrict_logits as kernel
from spec_decode.ops.restrict_logits import restrict_logits

INF = float("inf")


def both_ways(logits, top_k, top_p):
    """The rows by the kernel and by its specification."""
    out = logits.clone(), logits.clone()
    k, p = torch.tensor(top_k, dtype=torch.int32), torch.tensor(top_p)
    restrict_logits(out[0], top_k=k, top_p=p)
    with torch_implementations():
        restrict_logits(out[1], top_k=k, top_p=p)
    return out


def same(pair):
    return torch.equal(*pair)


def noise(rows, vocab, seed=0, scale=3.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("vocab", [1, 2, 37, 1000, 9001])
def test_a_vocabulary_of_any_size(vocab):
    assert same(both_ways(noise(4, vocab), [5, 0, 5, 0], [1.0, 0.9, 0.8, 1.0]))


@pytest.mark.parametrize("top_k", [1, 2, 50, 299, 300, 301, 2**31 - 1])
def test_top_k_of_any_size(top_k):
    by_kernel, by_torch = both_ways(noise(1, 300), [top_k], [1.0])
    assert torch.equal(by_kernel, by_torch) and (by_kernel > -INF).sum() == min(top_k, 300)


@pytest.mark.parametrize("top_p", [1e-30, 0.01, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0])
def test_top_p_of_any_share(top_p, scale):
    assert same(both_ways(noise(1, 300, scale=scale), [0], [top_p]))


@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0])
def test_a_share_at_the_grain_of_fp32_is_met_within_it(scale):
    logits, top_p, grain = noise(1, 300, scale=scale), 0.999999, 1e-6
    stays = both_ways(logits, [0], [top_p])[0] > -INF
    share = logits.double().softmax(-1)
    assert share[stays].sum() >= top_p - grain and share[stays].sum() - share[stays].min() < top_p + grain
    assert logits[~stays].lt(logits[stays].min()).all()


@pytest.mark.parametrize("seed", range(4))
def test_top_p_over_what_top_k_left(seed):
    assert same(both_ways(noise(3, 300, seed), [2, 20, 200], [0.5, 0.9, 0.97]))


def test_a_group_of_rows_for_each_request():
    assert same(both_ways(noise(6, 100), [3, 0, 0], [1.0, 0.5, 1.0]))


@pytest.mark.parametrize("scale", [1.0, 2.0, 4.0])
def test_logits_with_many_ties(scale):
    coarse = (noise(3, 400) * scale).round() / scale
    assert same(both_ways(coarse, [40, 0, 40], [1.0, 0.8, 0.8]))


def test_logits_that_are_all_equal():
    by_kernel, by_torch = both_ways(torch.full((2, 70), -2.5), [3, 0], [1.0, 0.2])
    assert torch.equal(by_kernel, by_torch) and (by_kernel == -2.5).all()


def test_logits_of_every_magnitude():
    powers = torch.cat([2.0 ** torch.arange(-140, 127), -(2.0 ** torch.arange(-140, 127)), torch.tensor([0.0, -0.0])])
    assert same(both_ways(powers[torch.randperm(len(powers))].expand(3, -1).contiguous(), [9, 268, 500], [1.0] * 3))


def test_tokens_that_were_out_already():
    logits = noise(3, 100).masked_fill(torch.arange(100) % 3 == 0, -INF)
    by_kernel, by_torch = both_ways(logits, [10, 90, 0], [1.0, 1.0, 0.9])
    assert torch.equal(by_kernel, by_torch) and (by_kernel > -INF).sum(1).tolist()[:2] == [10, 66]


def test_a_row_that_is_not_restricted_is_not_read():
    poison = torch.full((2, 50), float("nan"))
    assert both_ways(poison, [0, 50], [1.0, 1.0])[0].isnan().all()


@pytest.mark.parametrize("garbage", [float("nan"), INF, -INF])
def test_a_row_of_garbage_ends_and_leaves_the_others_alone(garbage):
    logits = noise(3, 50)
    logits[1, ::2] = garbage
    by_kernel, by_torch = both_ways(logits, [3, 3, 0], [0.9, 0.9, 0.9])
    assert torch.equal(by_kernel[[0, 2]], by_torch[[0, 2]])
    logits[1] = garbage
    assert torch.equal(both_ways(logits, [3, 3, 0], [0.9, 0.9, 0.9])[0][[0, 2]], by_torch[[0, 2]])


def test_the_memory_behind_the_last_row_is_not_written():
    memory = torch.zeros(300)
    memory[:200] = noise(1, 200)[0]
    restrict_logits(memory[:200].view(2, 100), top_k=torch.tensor([3], dtype=torch.int32), top_p=torch.tensor([0.9]))
    assert (memory[:200] == -INF).any() and not memory[200:].any()


@pytest.fixture
def narrow(monkeypatch):
    """A lane of the kernel keeps 4 logits: of rows this much wider than a block it cannot keep all at first."""
    monkeypatch.setattr(kernel, "_BLOCK", 32)


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
}


@pytest.mark.parametrize("row", WIDE.values(), ids=WIDE)
def test_a_row_that_no_registers_hold(narrow, row):
    restrictions = [(1, 1.0), (200, 1.0), (0, 0.95), (50, 0.9)]
    rows = row.expand(len(restrictions), -1).contiguous()
    assert same(both_ways(rows, *map(list, zip(*restrictions, strict=True))))


@pytest.mark.parametrize("garbage", [float("nan"), INF, -INF])
def test_a_wide_row_of_garbage_ends_and_leaves_the_others_alone(narrow, garbage):
    logits = noise(3, 300)
    logits[1, ::2] = garbage
    by_kernel, by_torch = both_ways(logits, [30, 30, 0], [0.9, 0.9, 0.9])
    assert torch.equal(by_kernel[[0, 2]], by_torch[[0, 2]])
