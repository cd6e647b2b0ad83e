import torch

from attn_backends.kernels.fp8_ds_mla import page_bytes
from attn_backends.kernels.latent_rotary import inverse_rotary
from attn_backends.kernels.write_latent import KvANormRope, write_latent
from builders.kernels.list_window_slots import list_window_slots
from builders.kernels.triton_runtime import torch_implementations

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


def test_a_turn_rounds_ties_to_the_even_bfloat16():
    step, half = 2**-7, 2**-8
    out = torch.tensor([1, 1, 1 + step, 1, -1, -1, -1 - step, -1]).bfloat16().view(1, 4, 2)
    inverse_rotary(out, torch.tensor([0]), torch.tensor([[1, half]]))
    assert out[0, :, 0].tolist() == [1, 1 + 2 * step, -1, -1 - 2 * step]


def test_list_window_slots_reads_no_length_after_the_last_request():
    """Tokens after the last request, and a stale length in the row that would be next."""
    lens, indices = torch.ones(5, dtype=torch.int32), torch.zeros(5, 128, dtype=torch.int32)
    seq_lens, starts = torch.tensor([9, 4, 7], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)
    table, positions = torch.arange(9, dtype=torch.int32).view(3, 3), torch.tensor([8, 3, 6, 6, 6])
    list_window_slots(indices, lens, positions, seq_lens[:2], starts, table[:2], 5, 4)
    assert lens.tolist() == [5, 4, 0, 0, 0] and indices[2:].eq(-1).all()
