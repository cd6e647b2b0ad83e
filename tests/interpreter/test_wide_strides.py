"""Views whose strides fit in 32 bits, but whose elements are more than 2^31 apart.

Run in the kernels' session, and on a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attn_backends.kernels.head_rotary import inverse_rotary, prepare_query
from attn_backends.kernels.latent_attention import latent_attention
from attn_backends.kernels.paged_attention import paged_attention
from attn_backends.kernels.rope import Rope, apply_rope
from attn_backends.kernels.rope_and_write_kv import rope_and_write_kv
from attn_backends.kernels.sparse_attention import sparse_attention
from attn_backends.kernels.write_kv import write_kv
from attn_backends.kernels.write_latent import write_latent
from builders.kernels.triton_runtime import interpreting
from spec_decode.models.kernels.mla_query_key import mla_query_key
from spec_decode.sampling.kernels.draw_target import draw_target
from spec_decode.sampling.kernels.process_logits import ProcessLogits, process_logits
from spec_decode.verification.kernels.block_verify import block_verify
from spec_decode.verification.kernels.rejection_sample import rejection_sample
from spec_decode.verification.kernels.verify_arguments import VerifyArguments

STEP = 2**30 + 64
DEVICES = ["cpu", *["cuda"] * (torch.cuda.is_available() and not interpreting())]
"""On CUDA a case takes up to 18 GB."""


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def slots():
    return torch.tensor([5, 2, 0])


def angles(rotary):
    return torch.arange(6 * rotary).view(6, rotary).float().cos()


def paged(query, key_cache, value_cache):
    batch = ints(0, 1).view(1, 2), ints(6), ints(0, 3)
    numbers = None, None, 3, 6, 1, 0.1, None, None, True, False, None, None
    return [paged_attention(query, key_cache, value_cache, *batch, *numbers)]


def latent(query, cache):
    return [
        latent_attention(query, cache, ints(0, 1).view(1, 2), ints(6), ints(0, 3), None, 3, 1, 32, 0.1, True, False)
    ]


def sparse(query, cache):
    return [sparse_attention(query, cache, ints(0, 5, 2, 4, 3, 1).view(3, 2), ints(2, 2, 2), None, 3, 0.1, False)]


def stored(key, value, key_cache, value_cache):
    write_kv(key, value, key_cache, value_cache, slots())
    return [key_cache, value_cache]


def turned_and_stored(query, key, value, key_cache, value_cache):
    rope_and_write_kv(query, key, value, Rope(slots(), angles(64)), key_cache, value_cache, slots())
    return [query, key_cache, value_cache]


def turned(x):
    return [apply_rope(x, Rope(slots(), angles(64)))]


def prepared(query):
    return [prepare_query(query, slots(), angles(32), eps=1e-6)]


def turned_back(out):
    return [inverse_rotary(out, slots(), angles(32))]


def latent_stored(new, cache):
    write_latent(new, cache, slots())
    return [cache]


def put_together(absorbed, rotated, new):
    return mla_query_key(absorbed, rotated, new, torch.ones(64), 1e-6, Rope(slots(), angles(32)))


def processed(logits):
    return [process_logits(*ProcessLogits(logits, torch.ones(3)))]


def drawn(logits):
    zeros, copied = torch.zeros(3, dtype=torch.int64), torch.zeros(logits.shape)
    positions = torch.zeros(logits.shape[:2], dtype=torch.int64)
    return [draw_target(logits, copied, zeros.bool(), torch.zeros(3), zeros, positions, None)]


def verified(op, draft_logits):
    """Drafts of the last token, which q makes all but certain in the last column, and p one of three."""
    draft_logits.zero_()[:, 2, 2] = 20
    tokens, numbers = torch.full((8, 3), 2), torch.arange(8)
    arguments = torch.zeros(8, 4, 3), tokens, draft_logits, torch.ones(8), numbers, 50 + numbers, 10 * numbers
    return op(*VerifyArguments(*arguments).checked())


def by_rejection(draft_logits):
    return verified(rejection_sample, draft_logits)


def by_block(draft_logits):
    return verified(block_verify, draft_logits)


HEADS, CACHE, LATENTS, DRAFTS = (3, 3, 64), (2, 3, 3, 64), (2, 3, 64), (8, 3, 3)
WIDE = {"query": [1], "key": [1], "value": [1], "key_cache": [1, 2], "value_cache": [1, 2], "cache": [1], "new": [0],
        "absorbed": [1], "rotated": [1], "x": [1], "out": [1], "logits": [2], "draft_logits": [1, 2]}  # fmt: skip
"""Of each operand the dims that may be so wide; that of the drafts' rows would take 280 GB."""
CASES = [
    (paged, {"query": HEADS, "key_cache": CACHE, "value_cache": CACHE}),
    (latent, {"query": HEADS, "cache": LATENTS}),
    (sparse, {"query": HEADS, "cache": LATENTS}),
    (stored, {"key": HEADS, "value": HEADS, "key_cache": CACHE, "value_cache": CACHE}),
    (turned_and_stored, {"query": HEADS, "key": HEADS, "value": HEADS, "key_cache": CACHE, "value_cache": CACHE}),
    (turned, {"x": HEADS}),
    (prepared, {"query": HEADS}),
    (turned_back, {"out": HEADS}),
    (latent_stored, {"new": (3, 64), "cache": LATENTS}),
    (put_together, {"absorbed": HEADS, "rotated": (3, 3, 32), "new": (3, 96)}),
    (processed, {"logits": (3, 1, 3)}),
    (drawn, {"logits": (3, 1, 3)}),
    (by_rejection, {"draft_logits": DRAFTS}),
    (by_block, {"draft_logits": DRAFTS}),
]
PLACES = [
    pytest.param(op, shapes, name, dim, id=f"{op.__name__}-{name}-{dim}")
    for op, shapes in CASES
    for name in shapes
    for dim in WIDE[name]
]


def widened(tensor: torch.Tensor, dim: int, folder: Path) -> torch.Tensor:
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
    return storage.as_strided(tensor.shape, strides, 2**31).copy_(tensor)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op", "shapes", "name", "dim"), PLACES)
def test_elements_beyond_32_bit_offsets_are_read(op, shapes, name, dim, device, tmp_path):
    generator = torch.Generator().manual_seed(1)
    tensors = {each: torch.randn(shape, generator=generator).to(device) for each, shape in shapes.items()}
    wide = {**{each: tensor.clone() for each, tensor in tensors.items()}, name: widened(tensors[name], dim, tmp_path)}
    with torch.device(device):
        for found, wanted in zip(op(**wide), op(**tensors), strict=True):
            assert torch.equal(found, wanted)
