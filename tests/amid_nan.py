"""Operands in memory whose surroundings show: what a kernel reads beside them reaches its result."""

import torch

_AROUND = 1 << 17
"""Elements on either side: more than the tile of any kernel has."""


def amid_nan(part):
    """The same values as a contiguous part of a buffer that holds NaN before and after them; what is no float tensor is
    returned as it is."""
    if not isinstance(part, torch.Tensor) or not part.is_floating_point():
        return part
    buffer = torch.full((part.numel() + 2 * _AROUND,), torch.nan, dtype=part.dtype)
    view = buffer[_AROUND : _AROUND + part.numel()].view(part.shape)
    return view.copy_(part)
