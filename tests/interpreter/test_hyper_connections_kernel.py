"""The kernels of hyper_connections against float64."""

import torch

from spec_decode.models.kernels.hyper_connections import read_streams, write_streams
from tests.spec_decode.models.kernels.hyper_oracle import (
    EPS,
    assert_rounded,
    exact_read,
    make_case,
)


def read(case, iterations=20):
    return read_streams(case.streams, case.mixes, case.scale, case.base, iterations=iterations, eps=EPS)


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
