"""What hyper-connections promise of the streams; the formulas as a whole are judged in test_deepseek_v4 as well."""

import pytest
import torch

from builders.errors import BatchError
from spec_decode.models.kernels.hyper_connections import collapse_streams, read_streams, write_streams
from spec_decode.models.layers.hyper_connections import HyperConnection, HyperHead, HyperShape
from tests.spec_decode.models.kernels.hyper_oracle import (
    EPS,
    assert_rounded,
    exact_collapse,
    exact_read,
    exact_write,
    make_case,
)

SHAPE = HyperShape(streams=4, hidden=8, iterations=20, eps=1e-6, norm_eps=1e-6)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_connection():
    return HyperConnection(SHAPE, noise(24, 32) / 4, noise(3, seed=1), noise(24, seed=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("streams", "iterations"), [(1, 1), (3, 2), (4, 20)])
def test_the_torch_implementation_of_what_is_read_and_written(streams, iterations, dtype):
    case = make_case(streams=streams, dtype=dtype)
    x, *into = read_streams(case.streams, case.mixes, case.scale, case.base, iterations=iterations, eps=EPS)
    exact, *shares = exact_read(case, iterations)
    assert_rounded(x, exact, dtype)
    for found, share in zip(into, shares, strict=True):
        assert_rounded(found, share, torch.float32)
    written = write_streams(case.streams, case.output, *into)
    assert_rounded(written, exact_write(case.streams, case.output, *into), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_torch_implementation_of_a_collapse(dtype):
    case = make_case(dtype=dtype)
    assert_rounded(collapse_streams(case.streams, *case.head, eps=EPS), exact_collapse(case), dtype)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"streams": torch.zeros(3, 200)}, r"streams must be .* \[None, None, None\] .*, got torch.float32 \[3, 200\]"),
        ({"mixes": torch.zeros(2, 24)}, r"mixes must be torch.float32 \[3, 24\] .*, got torch.float32 \[2, 24\]"),
        ({"mixes": torch.zeros(3, 24).half()}, r"mixes .* got torch.float16 \[3, 24\]"),
        ({"scale": torch.zeros(1)}, r"scale must be torch.float32 \[3\] .*, got torch.float32 \[1\]"),
        ({"base": torch.zeros(4)}, r"base must be torch.float32 \[24\] .*, got torch.float32 \[4\]"),
        ({"iterations": 0}, "at least 1 time, got iterations=0"),
    ],
)
def test_what_cannot_be_read_is_named(change, found):
    case = make_case()
    operands = {"streams": case.streams, "mixes": case.mixes, "scale": case.scale, "base": case.base}
    with pytest.raises(BatchError, match=found):
        read_streams(**{**operands, "iterations": 20, "eps": EPS, **change})


def test_a_collapse_by_the_shares_of_a_block_is_refused():
    case = make_case()
    with pytest.raises(BatchError, match=r"mixes must be torch.float32 \[3, 4\] .*, got torch.float32 \[3, 24\]"):
        collapse_streams(case.streams, case.mixes, case.scale, case.base, eps=EPS)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"output": torch.zeros(3, 8)}, r"output must be torch.float32 \[3, 50\] .*, got torch.float32 \[3, 8\]"),
        ({"output": torch.zeros(3, 50).half()}, r"output .* got torch.float16"),
        ({"write": torch.zeros(3, 3)}, r"write must be torch.float32 \[3, 4\] .*, got torch.float32 \[3, 3\]"),
        ({"carry": torch.zeros(3, 4)}, r"carry must be torch.float32 \[3, 4, 4\] .*, got torch.float32 \[3, 4\]"),
    ],
)
def test_what_cannot_be_written_is_named(change, found):
    case = make_case()
    operands = {"output": case.output, "write": torch.zeros(3, 4), "carry": torch.zeros(3, 4, 4)}
    with pytest.raises(BatchError, match=found):
        write_streams(case.streams, **{**operands, **change})


def test_streams_are_mixed_by_a_matrix_whose_rows_and_columns_sum_up_to_1():
    mixes = noise(50, 24) * 2
    *_, carry = read_streams(noise(50, 4, 8), mixes, noise(3, seed=1), noise(24, seed=2), iterations=20, eps=1e-6)
    assert carry.min() > 0
    for dim in (1, 2):
        torch.testing.assert_close(carry.sum(dim), torch.ones(50, 4), rtol=0, atol=2e-3)


def test_what_all_streams_hold_together_is_kept_where_the_block_adds_nothing():
    streams, connection = noise(6, 4, 8), make_connection()
    _, *into = connection.read(streams)
    kept = write_streams(streams, torch.zeros(6, 8), *into)
    torch.testing.assert_close(kept.sum(1), streams.sum(1), rtol=0, atol=2e-2)


@torch.no_grad()
def test_a_token_reads_and_writes_alone_what_it_does_among_many():
    streams, connection, head = noise(9, 4, 8), make_connection(), HyperHead(SHAPE, noise(4, 32), noise(1), noise(4))
    x, *into = connection.read(streams)
    alone, *into_alone = connection.read(streams[2:3])
    torch.testing.assert_close(alone, x[2:3])
    torch.testing.assert_close(write_streams(streams[2:3], alone, *into_alone), write_streams(streams, x, *into)[2:3])
    torch.testing.assert_close(head(streams[2:3]), head(streams)[2:3])


def test_the_streams_keep_their_dtype_though_their_shares_are_computed_in_fp32():
    streams, connection = noise(6, 4, 8).bfloat16(), make_connection()
    x, *into = connection.read(streams)
    head = HyperHead(SHAPE, noise(4, 32) / 4, torch.ones(1), noise(4))
    assert {x.dtype, write_streams(streams, x, *into).dtype, head(streams).dtype} == {torch.bfloat16}
    assert {part.dtype for part in into} == {torch.float32}
