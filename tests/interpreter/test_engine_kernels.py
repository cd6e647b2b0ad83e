"""Kernels before and after the target's forward, against the torch reference of their ops."""

import pytest
import torch

from builders.kernels.triton_runtime import torch_implementations
from spec_decode.engine.kernels.prepare_inputs import prepare_inputs
from spec_decode.engine.kernels.update_requests import UpdateRequests, update_requests


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that a launch allocates holds garbage, which must reach no output."""
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda self, *shape, **options: new_empty(self, *shape, **options).fill_(-(2**30))
    )


def both_ways(call):
    by_kernel = call()
    with torch_implementations():
        return by_kernel, call()


def same(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def whole(low, high, rows, seed):
    return torch.randint(low, high, (rows,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_what_a_step_begins_with(steps):
    lens, last = torch.tensor([0, 1, 7, 900]), torch.tensor([0, 5, 6, 7])
    drafts = whole(-2, 9, 4 * (steps + 1), 0).view(4, steps + 1)[:, :steps]
    assert same(*both_ways(lambda: prepare_inputs(lens, last, drafts)))


DRAFT_INPUTS = (torch.int32, torch.int32, torch.int64, torch.int32)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
@pytest.mark.parametrize("position_offset", [0, 1])
@pytest.mark.parametrize("drafting", [True, False])
def test_what_a_step_leaves(drafting, position_offset, steps):
    def updated():
        drafts = whole(-1, 9, 6 * (steps + 1), 3).view(6, steps + 1)
        # A row of each written buffer is beyond the step.
        buffers = [torch.full((7, 1 + steps), 7), *(torch.full((7,), 7, dtype=t) for t in DRAFT_INPUTS)]
        step = UpdateRequests(
            whole(0, steps + 1, 6, 1), whole(0, 99, 6, 2), drafts.clamp(min=0), drafts[:, 1:],
            torch.tensor([0, 1, 7, 900, 20, 7]), torch.tensor([0, 30, 9, 901, 24, 7]), torch.full((6,), 7),
            torch.full((7, 2 + steps), 7)[:6],
            *(buffer[:6] if drafting else None for buffer in buffers), position_offset,
        )  # fmt: skip
        update_requests(*step)
        return step.lens, step.max_lens, step.last_tokens, step.outputs, *buffers

    assert same(*both_ways(updated))
