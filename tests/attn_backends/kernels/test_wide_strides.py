"""Views whose strides fit in 32 bits and whose elements do not lie within 2^31 of each other."""

from __future__ import annotations

import pytest
import torch

from attn_backends.kernels.latent_attention import latent_attention
from attn_backends.kernels.latent_rotary import inverse_rotary, prepare_query
from attn_backends.kernels.paged_attention import paged_attention
from attn_backends.kernels.rope import Rope, apply_rope
from attn_backends.kernels.rope_and_write_kv import rope_and_write_kv
from attn_backends.kernels.sparse_attention import sparse_attention
from attn_backends.kernels.write_kv import write_kv
from attn_backends.kernels.write_latent import write_latent

STEP = 2**30 + 64
DEVICES = ["cpu", *["cuda"] * torch.cuda.is_available()]
"""On CUDA a case takes up to 10 GB."""


def paged(query, key_cache, value_cache):
    table, lens, starts = ints([0, 1], query).view(1, 2), ints([6], query), ints([0, len(query)], query)
    numbers = (None, None, 3, 6, 1, 0.1, None, None, True, False)
    return [paged_attention(query, key_cache, value_cache, table, lens, starts, *numbers)]


def latent(query, cache):
    table, lens, starts = ints([0, 1], query).view(1, 2), ints([6], query), ints([0, len(query)], query)
    return [latent_attention(query, cache, table, lens, starts, None, 3, 1, 32, 0.1, True, False)]


def sparse(query, cache):
    lists = ints([0, 5, 2, 4, 3, 1], query).view(3, 2)
    return [sparse_attention(query, cache, lists, ints([2, 2, 2], query), None, 3, 0.1, False)]


def stored(key, value, key_cache, value_cache):
    write_kv(key, value, key_cache, value_cache, ints([5, 2, 0], key).long())
    return [key_cache, value_cache]


def turned_and_stored(query, key, value, key_cache, value_cache):
    slots = ints([5, 2, 0], key).long()
    rope_and_write_kv(query, key, value, Rope(slots, angles(key, 64)), key_cache, value_cache, slots)
    return [query, key_cache, value_cache]


def turned(x):
    return [apply_rope(x, Rope(ints([5, 2, 0], x).long(), angles(x, 64)))]


def prepared(query):
    return [prepare_query(query, ints([5, 2, 0], query).long(), angles(query, 32), eps=1e-6)]


def turned_back(out):
    return [inverse_rotary(out, ints([5, 2, 0], out).long(), angles(out, 32))]


def latent_stored(new, cache):
    write_latent(new, cache, ints([5, 2, 0], new).long())
    return [cache]


def ints(values, like):
    return torch.tensor(values, dtype=torch.int32, device=like.device)


def angles(like, rotary):
    return torch.arange(6 * rotary, device=like.device).view(6, rotary).float().cos()


HEADS, CACHE, LATENTS = (3, 3, 64), (2, 3, 3, 64), (2, 3, 64)
CASES = [
    (paged, {"query": HEADS, "key_cache": CACHE, "value_cache": CACHE}, {"query": [1], "key_cache": [1, 2],
                                                                         "value_cache": [1, 2]}),
    (latent, {"query": HEADS, "cache": LATENTS}, {"query": [1], "cache": [1]}),
    (sparse, {"query": HEADS, "cache": LATENTS}, {"query": [1], "cache": [1]}),
    (stored, {"key": HEADS, "value": HEADS, "key_cache": CACHE, "value_cache": CACHE},
     {"key": [1], "value": [1], "key_cache": [1, 2], "value_cache": [1, 2]}),
    (turned_and_stored, {"query": HEADS, "key": HEADS, "value": HEADS, "key_cache": CACHE, "value_cache": CACHE},
     {"query": [1], "key": [1], "value": [1], "key_cache": [1, 2], "value_cache": [1, 2]}),
    (turned, {"x": HEADS}, {"x": [1]}),
    (prepared, {"query": HEADS}, {"query": [1]}),
    (turned_back, {"out": HEADS}, {"out": [1]}),
    (latent_stored, {"new": (3, 64), "cache": LATENTS}, {"new": [0], "cache": [1]}),
]  # fmt: skip
WIDE = [(op, shapes, name, dim) for op, shapes, wide in CASES for name, dims in wide.items() for dim in dims]


def widened(tensor, dim, folder):
    """A view of the same numbers, STEP apart in one dim; an offset that wraps at 2^31 stays in the storage.

    On a CPU the storage is a file of holes, of which only what is touched takes memory.
    """
    size = 2**31 + (tensor.shape[dim] - 1) * STEP + tensor.numel()
    if tensor.device.type == "cpu":
        storage = torch.from_file(str(folder / "holes"), shared=True, size=size, dtype=tensor.dtype)
    else:
        storage = torch.zeros(size, dtype=tensor.dtype, device=tensor.device)
    strides = list(tensor.stride())
    strides[dim] = STEP
    view = storage.as_strided(tensor.shape, strides, 2**31)
    return view.copy_(tensor)


def check_wide(op, shapes, name, dim, device, folder):
    generator = torch.Generator().manual_seed(1)
    tensors = {each: torch.randn(shape, generator=generator).half().to(device) for each, shape in shapes.items()}
    wide = {**{each: tensor.clone() for each, tensor in tensors.items()}, name: widened(tensors[name], dim, folder)}
    for found, wanted in zip(op(**wide), op(**tensors), strict=True):
        assert torch.equal(found, wanted)


each_wide_dim = pytest.mark.parametrize(
    ("op", "shapes", "name", "dim"), WIDE, ids=[f"{op.__name__}-{name}-{dim}" for op, _, name, dim in WIDE]
)


@pytest.mark.parametrize("device", DEVICES)
@each_wide_dim
def test_numbers_more_than_two_to_the_31_apart_are_found(op, shapes, name, dim, device, tmp_path):
    check_wide(op, shapes, name, dim, device, tmp_path)
