"""8-bit weights, and the two forms of weight that products accept.

Legend: N outputs, K inputs. Stacked weights have more axes, before N.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import nn

from builders.devices import converts_fp8

DTYPE = torch.float8_e4m3fn
READING = (torch.bfloat16, torch.float16)
"""Dtypes of the rows that products multiply by 8-bit weights."""
_LARGEST = torch.finfo(DTYPE).max
_WIDE = torch.arange(256, dtype=torch.uint8).view(DTYPE).float()
"""The value of each byte."""
_ROWS_AT_ONCE = 4096
"""Rows quantised at once: an fp32 copy of all experts, or of an output projection, would take gigabytes."""


class Fp8Weight(nn.Module):
    """values [..., N, K] times scale [..., N], one scale for each output. Products read the values and multiply their
    sums by the scale.

    values  float8_e4m3fn, contiguous
    scale   fp32
    """

    values: torch.Tensor
    scale: torch.Tensor

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("values", values)
        self.register_buffer("scale", scale)

    @classmethod
    def of(cls, weight: torch.Tensor) -> Fp8Weight:
        """Quantise weight [..., N, K], which must be finite, to the nearest 8-bit values. The scales map the largest
        magnitude of each output to the largest 8-bit value."""
        weight = weight.detach()
        values = torch.empty_like(weight, dtype=DTYPE, memory_format=torch.contiguous_format)
        scale = weight.new_empty(*weight.shape[:-1], 1, dtype=torch.float32)
        parts = (each.flatten(0, -2).split(_ROWS_AT_ONCE) for each in (values, weight, scale))
        for into, rows, divisor in zip(*parts, strict=True):
            wide = rows.float()
            # Not 0, even for an output of zeros.
            divisor.copy_((wide.abs().amax(-1, True) / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny))
            into.copy_(wide / divisor)
        return cls(values, scale[..., 0])

    @property
    def shape(self) -> torch.Size:
        """[..., N, K]."""
        return self.values.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the values and the scale."""
        return self.values.nbytes + self.scale.nbytes

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Fp8Weight:
        """Move to another device, as `Module.to` requests, but keep the dtypes: casting would lose the scale's bits,
        and no product reads the result."""
        device = fn(self.scale).device
        self.values, self.scale = self.values.to(device), self.scale.to(device)
        return self

    def __getitem__(self, index: slice | torch.Tensor | None) -> Fp8Weight:
        """Index the first axis: a view for a slice, a copy for int64 rows; None: a new first axis of size 1."""
        # Indexing with a tensor is not implemented for 8-bit floats on every device.
        return Fp8Weight(self.values.view(torch.uint8)[index].view(DTYPE), self.scale[index])

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight rounded to this dtype."""
        out = torch.empty(self.shape, dtype=dtype, device=self.values.device)
        parts = (each.flatten(0, -2).split(_ROWS_AT_ONCE) for each in (out, self.values, self.scale[..., None]))
        for into, values, scale in zip(*parts, strict=True):
            into.copy_(widened(values, scale[:, 0]))
        return out


Weight: TypeAlias = torch.Tensor | Fp8Weight
"""The weight of a product: a float tensor [..., N, K], or its 8-bit form."""


def operands(weight: Weight) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the kernel arguments for this weight: its numbers [..., N, K], and its scale fp32 [..., N], None unless it
    is in 8 bits."""
    return (weight.values, weight.scale) if isinstance(weight, Fp8Weight) else (weight, None)


def widened(values: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return the weight with these `operands`, in fp32."""
    if scale is None:
        return values.float()
    # On a CPU, a table lookup takes a quarter of the time of the conversion.
    found = _WIDE.index_select(0, values.view(torch.uint8).int().flatten()) if values.is_cpu else values.float()
    return found.view(values.shape) * scale[..., None]


def empty_stack(weight: Weight, count: int) -> Weight:
    """Return an uninitialised stack [count, ...] of weights with the shape and the form of this one."""
    values, scale = (None if each is None else each.new_empty(count, *each.shape) for each in operands(weight))
    assert values is not None
    return values if scale is None else Fp8Weight(values, scale)


def fill(stack: Weight, index: int, weight: Weight) -> None:
    """Copy a weight into this place of a stack of its form."""
    for into, part in zip(operands(stack), operands(weight), strict=True):
        if into is not None and part is not None:
            into[index].copy_(part)


def joined_rows(weights: Sequence[Fp8Weight]) -> Fp8Weight:
    """Stack weights [N, K] along the rows."""
    values = torch.cat([weight.values.view(torch.uint8) for weight in weights]).view(DTYPE)
    return Fp8Weight(values, torch.cat([weight.scale for weight in weights]))


def reads_fp8(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of rows in this dtype, on this device, read 8-bit weights."""
    return dtype in READING and converts_fp8(device)


def is_scaled(values: torch.Tensor, scale: torch.Tensor | None) -> bool:
    """Whether these are valid `operands`: 8 bits with a scale, or more bits without one."""
    if scale is None:
        return values.dtype != DTYPE
    return (
        values.dtype == DTYPE
        and scale.dtype == torch.float32
        and scale.shape == values.shape[:-1]
        and scale.device == values.device
        and scale.is_contiguous()
    )
