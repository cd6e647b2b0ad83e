"""The batch's rows of SGLang's request table: the kernel against its torch implementation, and that against loops."""

import pytest
import torch

from attn_backends.engines.sglang.kernels.load_tables import load_tables

STEPS = 3


@pytest.mark.parametrize("requests", [(4,), (4, 3, 2), (4, 3, 2, 1), (-3, 99)], ids=str)
@pytest.mark.parametrize(("lens", "page_size"), [([5, 0, 61, 1], 1), ([0, 7, 8, 9], 4), ([4, 61, 5, 5], 8)])
def test_load_tables_writes_reached_pages_only(lens, page_size, requests):
    """Of requests whose slots are pages in no order; one outside of the table counts as the nearest."""
    lens = lens[: len(requests)]
    pages = torch.randperm(5 * 64, generator=torch.Generator().manual_seed(0)).view(5, -1)[:, : 64 // page_size].int()
    wide = torch.full((5, 67), -1, dtype=torch.int32)
    wide[:, :64] = (pages[:, :, None] * page_size + torch.arange(page_size)).view(5, -1)
    seq_lens, table = torch.full((5,), -7, dtype=torch.int32), torch.full((5, 64 // page_size), -7, dtype=torch.int32)
    load_tables(wide[:, :64], torch.tensor(requests), torch.tensor(lens), seq_lens, table, page_size, STEPS)
    assert seq_lens.tolist() == [length + 1 for length in lens] + [-7] * (5 - len(lens))
    expected = torch.full_like(table, -7)
    for row, (request, length) in enumerate(zip(requests, lens, strict=True)):
        reached = -(-(length + STEPS) // page_size)
        expected[row, :reached] = pages[min(max(request, 0), 4), :reached]
    assert torch.equal(table, expected)
