"""The backend of examples/gather.py passes the kit."""

from __future__ import annotations

import runpy
from pathlib import Path

import torch

import attn_backends
from spec_decode.conformance import check_backend

EXAMPLE = Path(__file__).parents[2] / "examples" / "gather.py"


def test_the_smallest_backend_passes_the_kit() -> None:
    runpy.run_path(str(EXAMPLE))
    try:
        check_backend("gather", device=torch.device("cpu"), families=["contract", "builder", "graph", "poison"])
    finally:
        attn_backends.unregister("gather")
