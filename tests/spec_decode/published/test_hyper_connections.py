"""What hyper-connections promise of the streams; the formulas as a whole are judged in test_deepseek_v4."""

import torch

from spec_decode.models.published.hyper_connections import HyperConnection, HyperHead, HyperShape
from spec_decode.ops.split_mixes import split_mixes

SHAPE = HyperShape(streams=4, hidden=8, iterations=20, eps=1e-6, norm_eps=1e-6)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_connection():
    return HyperConnection(SHAPE, noise(24, 32) / 4, noise(3, seed=1), noise(24, seed=2))


def test_the_op_says_what_it_returns_and_writes():
    args = (noise(3, 24), noise(3, seed=1), noise(24, seed=2), 4, 20, 1e-6)
    torch.library.opcheck(torch.ops.spec_decode.split_mixes.default, args)


def test_streams_are_mixed_by_a_matrix_whose_rows_and_columns_sum_up_to_1():
    *_, carry = split_mixes(noise(50, 24) * 2, noise(3, seed=1), noise(24, seed=2), streams=4, iterations=20, eps=1e-6)
    assert carry.min() > 0
    for dim in (1, 2):
        torch.testing.assert_close(carry.sum(dim), torch.ones(50, 4), rtol=0, atol=2e-3)


def test_what_all_streams_hold_together_is_kept_where_the_block_adds_nothing():
    streams, connection = noise(6, 4, 8), make_connection()
    _, *into = connection.read(streams)
    kept = connection.write(streams, torch.zeros(6, 8), *into)
    torch.testing.assert_close(kept.sum(1), streams.sum(1), rtol=0, atol=2e-2)


def test_the_streams_keep_their_dtype_though_their_shares_are_computed_in_fp32():
    streams, connection = noise(6, 4, 8).bfloat16(), make_connection()
    x, *into = connection.read(streams)
    head = HyperHead(SHAPE, noise(4, 32) / 4, torch.ones(1), noise(4))
    assert {x.dtype, connection.write(streams, x, *into).dtype, head(streams).dtype} == {torch.bfloat16}
    assert {part.dtype for part in into} == {torch.float32}
