import pytest
import torch

from attn_backends.kernels.fp8_ds_mla import page_bytes
from attn_backends.kernels.latent_rotary import inverse_rotary, prepare_query
from attn_backends.kernels.write_latent import KvANormRope, write_latent
from builders import AttentionKind, BatchBuffers
from builders.kernels.list_window_slots import list_window_slots
from builders.kernels.triton_runtime import torch_implementations
from builders.sparse_window import SparseWindowBuilder
from tests.attn_backends.kernels.test_write_latent import hard_latents
from tests.factories import CPU, make_spec, make_tables

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CLOSE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2**-10, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-5},
}
"""One step of the 16-bit ones: a sum in another order may tip the rounding."""
SLOTS = torch.tensor([7, -1, 19, 0])


def noise(*shape, dtype=torch.float32, seed=0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


def both_ways(call):
    """What the call returns by the kernel, and by the torch implementation."""
    by_kernel = call()
    with torch_implementations():
        return by_kernel, call()


def make_norm(dim, rotary, tokens=4):
    positions = torch.arange(tokens) * 9
    return KvANormRope(weight=noise(dim, seed=1), eps=1e-6, positions=positions, table=noise(40, rotary, seed=2).cos())


def written(latent, cache, slots=SLOTS, **options):
    cache = cache.clone()
    write_latent(latent, cache, slots, **options)
    return cache


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 80, 512, 576])
def test_write_latent(dim, dtype):
    cache = noise(5, 4, dim, dtype=dtype, seed=3)
    by_kernel, by_torch = both_ways(lambda: written(noise(4, dim, dtype=dtype), cache))
    assert torch.equal(by_kernel, by_torch) and not torch.equal(by_kernel, cache)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (80, 6), (512, 64), (576, 64)])
def test_write_latent_with_norm(dim, rotary, dtype):
    latent, cache = noise(4, dim, dtype=dtype), torch.zeros(5, 4, dim, dtype=dtype)
    by_kernel, by_torch = both_ways(lambda: written(latent, cache, norm_rope=make_norm(dim, rotary)))
    torch.testing.assert_close(by_kernel, by_torch, **CLOSE[dtype])
    assert by_kernel.any(-1).sum() == 3


def any_bfloat16(tokens):
    """Finite numbers of every sign, exponent and mantissa."""
    bits = torch.randint(0, 2**16, (tokens, 512), generator=torch.Generator().manual_seed(4)).short()
    latent = bits.view(torch.bfloat16)
    return torch.where(latent.isfinite(), latent, torch.zeros_like(latent))


def one_exponent_a_tile(tokens):
    """Numbers of about one size within a tile, so that none vanishes beside another."""
    sizes = torch.randint(-40, 40, (tokens, 8, 1), generator=torch.Generator().manual_seed(5))
    return (noise(tokens, 8, 64) * torch.exp2(sizes)).flatten(1).bfloat16()


LATENTS = {"hard": hard_latents(), "any bits": any_bfloat16(12), "one exponent a tile": one_exponent_a_tile(12)}


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("latent", LATENTS.values(), ids=LATENTS)
def test_write_fp8_ds_mla_latent_bit_by_bit(latent, page_size):
    slots = torch.arange(len(latent)) * 2 + 1
    cache = torch.full((len(latent) * 2 // page_size + 1, page_bytes(page_size)), 0xAB, dtype=torch.uint8)
    by_kernel, by_torch = both_ways(lambda: written(latent, cache, slots, page_size=page_size))
    assert torch.equal(by_kernel, by_torch) and not torch.equal(by_kernel, cache)


def test_write_fp8_ds_mla_latent_with_norm_quantises_the_row_that_the_kernel_rounded():
    latent, norm = noise(4, 512, dtype=torch.bfloat16), make_norm(512, 64)
    empty, rows = torch.zeros(2, page_bytes(16), dtype=torch.uint8), torch.zeros(2, 16, 512, dtype=torch.bfloat16)
    by_kernel = written(latent, empty, page_size=16, norm_rope=norm)
    rows = written(latent, rows, norm_rope=norm).flatten(0, 1)
    with torch_implementations():
        assert torch.equal(by_kernel, written(rows[SLOTS.clamp(min=0)], empty, page_size=16))


def test_write_fp8_ds_mla_latent_with_norm_keeps_the_sign_of_a_zero():
    latent, empty = torch.full((4, 512), -0.0).bfloat16(), torch.zeros(2, page_bytes(16), dtype=torch.uint8)
    by_kernel, by_torch = both_ways(lambda: written(latent, empty, page_size=16, norm_rope=make_norm(512, 64)))
    assert torch.equal(by_kernel, by_torch) and by_kernel.eq(0x80).any()


SHAPES = [(3, 5, 512, 64), (2, 70, 64, 64), (2, 1, 80, 6), (1, 3, 576, 64)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "dim", "rotary"), SHAPES)
def test_prepare_query(tokens, heads, dim, rotary, dtype):
    query, table = noise(tokens, heads + 2, dim, dtype=dtype)[:, 1:-1], noise(40, rotary).cos()
    by_kernel, by_torch = both_ways(lambda: prepare_query(query, torch.arange(tokens) * 9, table, eps=1e-6))
    torch.testing.assert_close(by_kernel, by_torch, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "dim", "rotary"), SHAPES)
def test_inverse_rotary_bit_by_bit(tokens, heads, dim, rotary, dtype):
    def turned():
        whole = noise(tokens, heads + 2, dim, dtype=dtype)
        inverse_rotary(whole[:, 1:-1], torch.arange(tokens) * 9, noise(40, rotary).cos())
        return whole

    by_kernel, by_torch = both_ways(turned)
    assert torch.equal(by_kernel, by_torch)


def test_a_turn_rounds_ties_to_the_even_bfloat16():
    step, half = 2**-7, 2**-8
    out = torch.tensor([1, 1, 1 + step, 1, -1, -1, -1 - step, -1]).bfloat16().view(1, 4, 2)
    inverse_rotary(out, torch.tensor([0]), torch.tensor([[1, half]]))
    assert out[0, :, 0].tolist() == [1, 1 + 2 * step, -1, -1 - 2 * step]


BATCHES = {
    "decode": ([1] * 4, [1, 16, 17, 129], 6),
    "verify": ([5, 5], [5, 150], 3),
    "ragged": ([3, 1, 20], [3, 64, 20], 5),
    "more rows than lanes": ([1] * 35, [1 + 5 * row for row in range(35)], 37),
}


@pytest.mark.parametrize(("window", "page_size"), [(1, 16), (17, 1), (300, 16)])
@pytest.mark.parametrize(("query_lens", "seq_lens", "rows"), BATCHES.values(), ids=BATCHES)
def test_list_window_slots(query_lens, seq_lens, rows, window, page_size):
    tables = make_tables([192] * len(seq_lens), page_sizes=(page_size,), max_reqs=rows, max_seq_len=192)
    buffers = BatchBuffers(tables, max_tokens=64)
    _, num_tokens = buffers.load(query_lens, seq_lens, pad_reqs=rows)
    buffers.seq_lens[1] = 0
    view = buffers.view(0, num_reqs=rows, num_tokens=num_tokens + 2, max_query_len=max(query_lens))
    spec = make_spec(num_kv_heads=1, page_size=page_size, sliding_window=window, kind=AttentionKind.MLA)

    def lists():
        built = SparseWindowBuilder(spec, CPU, max_reqs=rows, max_tokens=64, max_seq_len=192).build(view)
        return built.window_indices, built.window_lens

    for by_kernel, by_torch in zip(*both_ways(lists), strict=True):
        assert torch.equal(by_kernel, by_torch) and by_kernel.any()


@pytest.mark.parametrize("slot", [20, 2**40, -2, -(2**40)])
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8_ds_mla"])
def test_write_latent_to_a_slot_outside_of_the_cache_writes_nothing(fp8, slot):
    """In the middle of a larger storage, where a stray write would be seen."""
    shape, dtype = ((page_bytes(4),), torch.uint8) if fp8 else ((4, 512), torch.bfloat16)
    latent, slots = noise(4, 512, dtype=torch.bfloat16), torch.tensor([slot, 7, -1, slot])

    def stored():
        storage = torch.zeros(9, *shape, dtype=dtype)
        write_latent(latent, storage[2:7], slots, page_size=4)
        return storage

    by_kernel, by_torch = both_ways(stored)
    assert torch.equal(by_kernel, by_torch) and by_kernel.flatten(1).any(1).nonzero().flatten().tolist() == [3]


def test_list_window_slots_reads_no_length_after_the_last_request():
    """Tokens after the last request, and a stale length in the row that would be next."""
    lens, indices = torch.ones(5, dtype=torch.int32), torch.zeros(5, 128, dtype=torch.int32)
    seq_lens, starts = torch.tensor([9, 4, 7], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)
    table, positions = torch.arange(9, dtype=torch.int32).view(3, 3), torch.tensor([8, 3, 6, 6, 6])
    list_window_slots(indices, lens, positions, seq_lens[:2], starts, table[:2], 5, 4)
    assert lens.tolist() == [5, 4, 0, 0, 0] and indices[2:].eq(-1).all()
