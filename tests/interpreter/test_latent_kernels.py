import torch

from attn_backends.kernels.fp8_ds_mla import page_bytes
from attn_backends.kernels.write_fp8_ds_mla import write_fp8_ds_mla
from attn_backends.kernels.write_latent import KvANormRope, write_latent
from builders.kernels.triton_runtime import torch_implementations
from tests.ops.sample import noise


def test_fp8_ds_mla_write_quantises_the_rounded_norm():
    slots, latent = torch.tensor([7, -1, 19, 0]), noise(4, 512, dtype=torch.bfloat16)
    table = noise(40, 64, seed=2).cos()
    norm = KvANormRope(weight=noise(512, seed=1), eps=1e-6, positions=torch.arange(4) * 9, table=table)
    rows, pages = torch.zeros(2, 16, 512).bfloat16(), torch.zeros(2, 2, page_bytes(16), dtype=torch.uint8)
    write_fp8_ds_mla(latent, pages[0], slots, page_size=16, norm_rope=norm)
    write_latent(latent, rows, slots, norm_rope=norm)
    with torch_implementations():
        write_fp8_ds_mla(rows.flatten(0, 1)[slots.clamp(min=0)], pages[1], slots, page_size=16)
    assert torch.equal(*pages)
