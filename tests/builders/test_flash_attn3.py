"""FlashAttention-3's builder without its kernels: any paged attention over the same metadata serves to judge it."""

import pytest
import torch

from attn_backends import Rejected, explain
from attn_backends.triton_paged import TritonPaged
from builders import FlashAttn3Builder
from spec_decode.conformance import check_backend
from tests.factories import CPU, make_spec


class StandIn(TritonPaged):
    name = "flash_attn3_stand_in"
    builder = FlashAttn3Builder


@pytest.mark.parametrize("family", ["contract", "builder", "graph"])
def test_the_builder_passes_the_kit_over_a_stand_in_kernel(family):
    check_backend(StandIn(), device=CPU, families=[family]).raise_if_failed()


def test_whole_rounds_agree_over_a_stand_in_kernel():
    check_backend(StandIn(), device=CPU, checks=["drafter.strategies_agree*k[47]-n[37]*"]).raise_if_failed()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without the kernels hears")
def test_without_the_kernels_it_is_refused_with_the_extra_that_brings_them():
    verdict = explain("flash_attn3", make_spec(), CPU)

    assert isinstance(verdict, Rejected)
    assert "attn-backends[flash-attn]" in verdict.reasons[0]
