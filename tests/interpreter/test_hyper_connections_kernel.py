"""The kernels of hyper_connections against float64."""

import pytest
import torch

from spec_decode.models.kernels.hyper_connections import collapse_streams, read_streams, write_streams
from tests.spec_decode.models.kernels.hyper_oracle import (
    EPS,
    assert_rounded,
    exact_collapse,
    exact_read,
    make_case,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def read(case, iterations=20):
    return read_streams(case.streams, case.mixes, case.scale, case.base, iterations=iterations, eps=EPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("streams", "hidden"), [(1, 50), (3, 50), (4, 1100)])
def test_a_head_collapses_the_streams(streams, hidden, dtype):
    case = make_case(streams=streams, hidden=hidden, dtype=dtype)
    assert_rounded(collapse_streams(case.streams, *case.head, eps=EPS), exact_collapse(case), dtype)


def test_views_are_read_as_what_they_show():
    case = make_case(tokens=6)
    shown = [part[::2] for part in (case.streams, case.output, *read(case)[1:])]
    assert torch.equal(write_streams(*shown), write_streams(*(part.clone() for part in shown)))
    assert torch.equal(
        read_streams(shown[0], case.mixes[::2], case.scale, case.base, iterations=2, eps=EPS)[0], read(case, 2)[0][::2]
    )


def test_logits_far_apart_stay_finite():
    case = make_case(tokens=1)
    case.mixes[:], case.scale[:], case.base[:] = torch.tensor([300.0, -300.0, 0.0, 300.0] * 6), 1, 0
    for found, exact in zip(read(case), exact_read(case, 20), strict=True):
        assert_rounded(found, exact, torch.float32)


def test_a_token_of_nan_stays_alone():
    case = make_case()
    clean = (*read(case), write_streams(case.streams, case.output, *read(case)[1:]))
    case.streams[1], case.mixes[1], case.output[1] = torch.nan, torch.nan, torch.nan
    found = (*read(case), write_streams(case.streams, case.output, *read(case)[1:]))
    for before, after in zip(clean, found, strict=True):
        assert torch.equal(after[::2], before[::2]) and after[1].isnan().all()


def test_no_tokens():
    case = make_case(tokens=0)
    x, *into = read(case)
    assert x.shape == (0, 50) and write_streams(case.streams, case.output, *into).shape == (0, 4, 50)
