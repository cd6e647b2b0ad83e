"""The hyper-connection ops: their formulas, and what they reject; test_published_drafts runs a whole model."""

import pytest
import torch

from builders.errors import BatchError
from spec_decode.models.kernels.hyper_connections import collapse_streams, read_streams, write_streams
from tests.spec_decode.models.kernels.hyper_oracle import (
    EPS,
    assert_rounded,
    exact_collapse,
    exact_read,
    exact_write,
    make_case,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("streams", "iterations"), [(1, 1), (3, 2), (4, 20)])
def test_torch_streams_match_float64_formula(streams, iterations, dtype):
    case = make_case(streams=streams, dtype=dtype)
    x, *into = read_streams(case.streams, case.mixes, case.scale, case.base, iterations=iterations, eps=EPS)
    exact, *shares = exact_read(case, iterations)
    assert_rounded(x, exact, dtype)
    for found, share in zip(into, shares, strict=True):
        assert_rounded(found, share, torch.float32)
    written = write_streams(case.streams, case.output, *into)
    assert_rounded(written, exact_write(case.streams, case.output, *into), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_collapse_matches_float64_formula(dtype):
    case = make_case(dtype=dtype)
    assert_rounded(collapse_streams(case.streams, *case.head, eps=EPS), exact_collapse(case), dtype)


READ = [
    ({"streams": torch.zeros(3, 200)}, r"streams must be .* \[None, None, None\] .*, got torch.float32 \[3, 200\]"),
    ({"mixes": torch.zeros(2, 24)}, r"mixes must be torch.float32 \[3, 24\] .*, got torch.float32 \[2, 24\]"),
    ({"mixes": torch.zeros(3, 24).half()}, r"mixes .* got torch.float16 \[3, 24\]"),
    ({"scale": torch.zeros(1)}, r"scale must be torch.float32 \[3\] .*, got torch.float32 \[1\]"),
    ({"base": torch.zeros(4)}, r"base must be torch.float32 \[24\] .*, got torch.float32 \[4\]"),
    ({"iterations": 0}, "iterations must be at least 1, got 0"),
]
WRITTEN = [
    ({"output": torch.zeros(3, 8)}, r"output must be torch.float32 \[3, 50\] .*, got torch.float32 \[3, 8\]"),
    ({"output": torch.zeros(3, 50).half()}, r"output .* got torch.float16"),
    ({"write": torch.zeros(3, 3)}, r"write must be torch.float32 \[3, 4\] .*, got torch.float32 \[3, 3\]"),
    ({"carry": torch.zeros(3, 4)}, r"carry must be torch.float32 \[3, 4, 4\] .*, got torch.float32 \[3, 4\]"),
]


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [*((read_streams, *row) for row in READ), *((write_streams, *row) for row in WRITTEN)],
)
def test_misfit_operands_are_named(op, change, message):
    case = make_case()
    operands = {
        "streams": case.streams,
        "output": case.output,
        "write": torch.zeros(3, 4),
        "carry": torch.zeros(3, 4, 4),
    }
    if op is read_streams:
        operands = {"streams": case.streams, "mixes": case.mixes, "scale": case.scale, "base": case.base}
        operands |= {"iterations": 20, "eps": EPS}
    with pytest.raises(BatchError, match=message):
        op(**{**operands, **change})


def test_collapse_rejects_mixes_of_a_block():
    case = make_case()
    with pytest.raises(BatchError, match=r"mixes must be torch.float32 \[3, 4\] .*, got torch.float32 \[3, 24\]"):
        collapse_streams(case.streams, case.mixes, case.scale, case.base, eps=EPS)
