"""The controls are right as built and stale from the first advance on, and the checks of an advance tell so."""

from __future__ import annotations

import pytest
import torch

from scripts.stale_controls import CHECKS, control, stale
from spec_decode.testing.batches import DECODE
from spec_decode.testing.expectations import CheckFailure
from spec_decode.testing.paged_fixture import PagedFixture
from spec_decode.testing.subject import Subject

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["torch_reference", "triton_paged", "triton_mla", "sparse_swa_mla"])
def test_a_control_is_right_as_built_and_wrong_after_an_advance(name: str) -> None:
    subject = Subject(stale(name), CPU)
    built = PagedFixture(subject, subject.base_spec(), DECODE.rows).build(DECODE, horizon=2)
    built.expect_attention("as built", cache="as built")
    built.advance()
    with pytest.raises(CheckFailure, match="after an advance"):
        built.expect_attention("after an advance")


@pytest.mark.parametrize("check", CHECKS)
def test_a_control_is_caught_by_every_check_of_an_advance(check: str) -> None:
    found = control(("triton_paged", check), CPU)
    assert found["built_right"] and found["caught"] and "step 0" not in found["first"]
