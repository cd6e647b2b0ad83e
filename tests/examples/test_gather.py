"""The backend of examples/gather.py passes the kit."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

import attn_backends
from spec_decode.conformance import check_backend

EXAMPLE = Path(__file__).parents[2] / "examples" / "gather.py"


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_smallest_backend_passes_the_kit(quick: bool) -> None:
    runpy.run_path(str(EXAMPLE))
    families = ["contract", "builder", "graph", "poison"]
    try:
        check_backend("gather", device=torch.device("cpu"), families=families, quick=quick)
    finally:
        attn_backends.unregister("gather")
