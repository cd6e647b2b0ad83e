"""Inverts the noise's hash: finds the seeds that give chosen words, so that a test can choose its noise."""

import pytest
import torch

MASK = 0xFFFFFFFF

each_device = pytest.mark.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])


def unmixed(h):
    """Invert MurmurHash3's finaliser, int64 in 32 bits."""
    h = ((h ^ (h >> 16)) * pow(0xC2B2AE35, -1, 2**32)) & MASK
    h = ((h ^ (h >> 13) ^ (h >> 26)) * pow(0x85EBCA6B, -1, 2**32)) & MASK
    return h ^ (h >> 16)


def tokens_with(keys, high):
    """Return the int64 tokens, of 32 bits, whose noise under these keys begins with the word `high`."""
    return unmixed((unmixed(high) - keys) & MASK) ^ ((keys >> 32) & MASK)


def seeds_with(high, low, positions, stream, token=0):
    """Return the int64 seeds whose noise at these positions consists of these words; all int64, broadcast together."""
    first = unmixed(low) ^ token
    inner = (unmixed((unmixed(high) - low) & MASK) - first) & MASK
    upper = unmixed(unmixed(first) ^ (positions & MASK)) ^ inner
    return upper << 32 | (unmixed(inner) ^ stream)


def seeds_of(uniform, positions, stream):
    """Return seeds int64 [N] whose uniform noise at positions int64 [N] is just below fp64 [N] in (0, 1), or equal."""
    words = torch.tensor([divmod(round(x * 2**64) - 1, 2**32) for x in uniform.tolist()])
    return seeds_with(words[:, 0], words[:, 1], positions, stream)
