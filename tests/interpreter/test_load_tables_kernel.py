"""The batch's rows of SGLang's table of requests: the kernel beside its torch implementation, and that beside loops."""

import pytest
import torch

from engines.sglang.kernels.load_tables import load_tables

STEPS = 3


def load(lens, page_size, dtype=torch.int64, width=64, requests=None):
    """Lengths and tables of requests whose slots are pages in no order; tables hold -7 where nothing is written."""
    generator = torch.Generator().manual_seed(0)
    pages = torch.randperm(5 * width, generator=generator).view(5, -1)[:, : width // page_size].int()
    wide = torch.full((5, width + 3), -1, dtype=torch.int32)
    slots = wide[:, :width]
    slots.copy_((pages[:, :, None] * page_size + torch.arange(page_size)).view(5, -1))
    requests = torch.tensor(requests or range(4, 4 - len(lens), -1))
    seq_lens = torch.full((len(lens) + 1,), -7, dtype=torch.int32)
    table = torch.full((len(lens) + 1, width // page_size), -7, dtype=torch.int32)
    load_tables(slots, requests, torch.tensor(lens, dtype=dtype), seq_lens, table, page_size, STEPS)
    return seq_lens, table, pages, requests


SHAPES = [([5], 1), ([0, 1, 61], 1), ([0, 7, 8, 9], 4), ([4, 61], 8)]


@pytest.mark.parametrize(("lens", "page_size"), SHAPES)
def test_rows_hold_the_pages_that_the_steps_reach_and_keep_the_rest(lens, page_size):
    seq_lens, table, pages, requests = load(lens, page_size)
    assert seq_lens.tolist() == [*(length + 1 for length in lens), -7]
    for row, length in enumerate(lens):
        reached = -(-(length + STEPS) // page_size)
        assert table[row, :reached].tolist() == pages[requests[row], :reached].tolist()
        assert (table[row, reached:] == -7).all()
    assert (table[-1] == -7).all()


def test_a_request_outside_of_the_table_counts_as_the_nearest():
    _, table, pages, _ = load([5, 5], 1, requests=[-3, 99])
    assert torch.equal(table[0, :8], pages[0, :8]) and torch.equal(table[1, :8], pages[4, :8])
