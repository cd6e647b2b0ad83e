"""Rows as kernels read them."""

from __future__ import annotations

import torch


def whole_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] with the D numbers of each row next to each other. Copied only where they are not."""
    return x if x.stride(-1) == 1 else x.contiguous()
