"""The hunt on a shared GPU, small and on the CPU: right replays pass, a wrong one is named."""

import pytest
import torch

from attn_backends import get
from attn_backends.triton_paged import TritonPaged
from scripts import shared_gpu_replays
from scripts.shared_gpu_replays import SHAPES, CapturedStep, hunt

CPU = torch.device("cpu")


@pytest.fixture
def step():
    return CapturedStep("triton_paged", SHAPES[0], CPU, torch.Generator().manual_seed(0))


def test_a_right_replay_is_within_the_tolerance(step):
    query, out, lens, _ = step.replay([3, 100, 0, 7] + [0] * 8, live=3)

    assert lens.tolist() == [11, 108, 8] + [0] * 9
    assert step.error(query, out, lens) < shared_gpu_replays.TOLERANCE


def test_one_wrong_number_is_beyond_the_tolerance(step):
    query, out, lens, _ = step.replay([3] * 12, live=12)
    out[5, 7, 11] += 0.1

    assert step.error(query, out, lens) == pytest.approx(0.1, rel=0.1)


def test_a_nan_is_an_infinite_error(step):
    query, out, lens, _ = step.replay([3] * 12, live=12)
    out[0, 0, 0] = float("nan")

    assert step.error(query, out, lens) == float("inf")


def test_a_process_counts_its_replays_and_names_a_wrong_one(monkeypatch):
    right = hunt(0, "triton_paged", seconds=0.01, replays=2, device=CPU)
    real = get("triton_paged").forward
    monkeypatch.setattr(TritonPaged, "forward", lambda self, *args, **kwargs: real(*args, **kwargs) + 1)
    wrong = hunt(0, "triton_paged", seconds=0.01, replays=2, device=CPU)

    assert right["replays"] == 2 * right["graphs"] > 0 and not right["wrong"]
    assert wrong["wrong"][0]["graph"] == 0 and wrong["wrong"][0]["lengths_right"] and wrong["wrong"][0]["error"] > 0.9
