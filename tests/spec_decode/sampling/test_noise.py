import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from spec_decode.sampling import noise
from tests.spec_decode.sampling.noise_words import seeds_with, tokens_with

N = 100_000
STREAMS = {"draft": noise.DRAFT, "accept": noise.ACCEPT, "target": noise.TARGET}
COUNT, ZERO = torch.arange(N), torch.zeros(N, dtype=torch.int64)


def over(seeds=ZERO, positions=ZERO, tokens=ZERO, stream=noise.DRAFT):
    return noise.uniform(noise.key(seeds, positions, stream), tokens).numpy()


AXES = {
    "seeds": lambda stream: over(seeds=COUNT, stream=stream),
    "large seeds": lambda stream: over(seeds=COUNT << 32, stream=stream),
    "negative seeds": lambda stream: over(seeds=-COUNT - 1, stream=stream),
    "positions": lambda stream: over(positions=COUNT, stream=stream),
    "tokens": lambda stream: over(tokens=COUNT, stream=stream),
    "tokens of one row": lambda stream: over(seeds=ZERO + 77, positions=ZERO + 5, tokens=COUNT, stream=stream),
}


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("draw", AXES.values(), ids=AXES)
def test_noise_is_uniform_along_every_axis(draw, stream):
    assert stats.kstest(draw(stream), "uniform").pvalue > 1e-4


NEIGHBOURS = {
    "seeds": (over(seeds=COUNT), over(seeds=COUNT + 1)),
    "positions": (over(positions=COUNT), over(positions=COUNT + 1)),
    "tokens": (over(tokens=COUNT), over(tokens=COUNT + 1)),
    "seed and position swapped": (over(COUNT, COUNT + 1), over(COUNT + 1, COUNT)),
    "tokens of neighbouring seeds": (over(ZERO, ZERO, COUNT), over(ZERO + 1, ZERO, COUNT)),
    "tokens of neighbouring positions": (over(ZERO, ZERO, COUNT), over(ZERO, ZERO + 1, COUNT)),
    "draft and accept": (over(positions=COUNT), over(positions=COUNT, stream=noise.ACCEPT)),
    "draft and target": (over(positions=COUNT), over(positions=COUNT, stream=noise.TARGET)),
    "accept and target": (over(seeds=COUNT, stream=noise.ACCEPT), over(seeds=COUNT, stream=noise.TARGET)),
}


@pytest.mark.parametrize(("a", "b"), NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_neighbouring_noise_is_independent(a, b):
    counts, _, _ = np.histogram2d(a, b, bins=16, range=[[0, 1], [0, 1]])
    assert stats.chisquare(counts.ravel()).pvalue > 1e-4


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31), st.lists(st.integers(0, 2**20), min_size=2, max_size=5))
def test_noise_depends_only_on_seed_position_token_stream(seed, position, tokens):
    rows = torch.tensor([[seed, position, token] for token in tokens])
    together = noise.uniform(noise.key(rows[:, 0], rows[:, 1], noise.DRAFT), rows[:, 2])
    alone = [noise.uniform(noise.key(row[None, 0], row[None, 1], noise.DRAFT), row[None, 2])[0] for row in rows.flip(0)]
    assert together.tolist() == torch.stack(alone).flip(0).tolist()


def test_extreme_hashes_give_noise_inside_open_interval(monkeypatch):
    for hashed in (0, 0xFFFFFFFF):
        monkeypatch.setattr(noise, "_mix", lambda h, value=hashed: torch.tensor([value]))
        assert 0 < noise.uniform(ZERO[:1], ZERO[:1]) < 1
        assert noise.gumbel(ZERO[:1], ZERO[:1]).isfinite()


@pytest.mark.parametrize("bit", [0, 1, 31, 32, 62, 63])
def test_every_bit_of_a_seed_counts(bit):
    seeds = torch.tensor([12345])
    flipped = seeds ^ torch.tensor([1]).bitwise_left_shift(bit)
    assert noise.key(seeds, ZERO[:1], noise.DRAFT) != noise.key(flipped, ZERO[:1], noise.DRAFT)


@pytest.mark.parametrize("other", [1001, 1000 ^ 1, 1000 ^ 256], ids=["next", "one bit off", "another bit off"])
def test_near_keys_share_no_noise(other):
    # A mixer of key + token, or of key ^ token alone, would give one key's noise to the other's neighbouring tokens.
    tokens = torch.arange(4096)
    a, b = (noise.uniform(torch.tensor([key]), tokens).tolist() for key in (1000, other))
    assert len(set(a) & set(b)) < 20


def test_mixer_is_murmurhash3_finaliser():
    def fmix32(h):
        h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
        h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
        return h ^ h >> 16

    values = [0, 1, 0xFFFFFFFF, 0x80000000, 123456789]
    assert noise._mix(torch.tensor(values)).tolist() == [fmix32(value) for value in values]


def test_gumbel_noise_has_a_gumbel_distribution():
    drawn = noise.gumbel(noise.key(COUNT, ZERO, noise.TARGET), ZERO).numpy()
    assert stats.kstest(drawn, "gumbel_r").pvalue > 1e-4


def noise_of(high, low, draw=noise.uniform):
    """Noise made of two words of 32 bits, ints or int64 [N]."""
    high, low = torch.atleast_1d(torch.as_tensor(high)), torch.atleast_1d(torch.as_tensor(low))
    seeds = seeds_with(high, low, torch.tensor(12345), noise.DRAFT)
    keys = noise.key(seeds, torch.full_like(seeds, 12345), noise.DRAFT)
    return draw(keys, torch.zeros_like(keys))


WORDS = {"both least": (0, 0), "low most": (0, 2**32 - 1), "high one": (1, 0), "both most": (2**32 - 1, 2**32 - 1)}
# Every pair of words has its own key, so of 2**64 keys just p * 2**64 give noise below p.
WORDS |= {f"next to {p}": divmod(round(p * 2**64), 2**32) for p in (0.3, 2.0**-23, 1e-9, 1e-14, 2.0**-60)}


@pytest.mark.parametrize(("high", "low"), WORDS.values(), ids=WORDS)
def test_noise_is_fraction_of_its_words(high, low):
    spelt = min((high * 2**32 + low + 0.5) / 2**64, 1 - 2**-24)
    assert noise_of(high, low).item() == pytest.approx(spelt, rel=2**-24)


def test_gumbel_noise_is_exact_over_its_range():
    words = torch.cat([torch.arange(300), 2 ** torch.arange(9, 32), 2**32 - 2 ** torch.arange(5, 32), ZERO[:1]])
    low = torch.where(words == 0, 0, (words * 2654435761) & 0xFFFFFFFF)
    x = noise_of(words, low).double()
    exact = -torch.log(-torch.log1p(-x))
    assert exact.max() > 45 and exact.min() < -2.5
    torch.testing.assert_close(noise_of(words, low, noise.gumbel).double(), exact, rtol=3e-7, atol=3e-6)


@pytest.mark.parametrize("bits", range(4))
def test_low_word_of_small_noise_is_uniform(bits):
    keys = noise.key(torch.arange(100_000), ZERO[:1] + bits, noise.DRAFT)
    rest = noise.uniform(keys, tokens_with(keys, torch.tensor(bits))) * 2.0**32 - bits
    assert stats.kstest(rest.numpy(), "uniform").pvalue > 1e-4


def test_seeds_never_share_key_at_one_position():
    # The words of any noise lead back to the one seed that makes them: the hash of seeds is a bijection.
    seeds = torch.randint(-(2**63), 2**63 - 1, (1000,), generator=torch.Generator().manual_seed(0))
    keys = noise.key(seeds, ZERO[:1000] + 5, noise.ACCEPT)
    low = noise._mix((keys >> 32) & 0xFFFFFFFF)
    high = noise._mix((low + keys) & 0xFFFFFFFF)
    assert torch.equal(seeds_with(high, low, ZERO[:1000] + 5, noise.ACCEPT), seeds)
