"""MXFP4 weights, as GPT-OSS publishes its experts': 4-bit floats in blocks of 32 with a power of two for each (OCP
Microscaling Formats 1.0, section 5.3).

Legend: E experts, N outputs, K inputs.
"""

from __future__ import annotations

import torch

from spec_decode.models.checkpoints.files import CheckpointError, is_finite, wider
from spec_decode.models.checkpoints.fp8_layout import FIELD, unconverted_modules
from spec_decode.models.checkpoints.store import ScopedWeights, TensorStore

_BLOCK = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NAN = 255
"""The scale that stands for NaN; any other s is 2 ** (s - 127)."""


def check_modules(store: TensorStore) -> None:
    """Raise CheckpointError for experts that are in another format than quantization_config says of them."""
    unconverted = unconverted_modules(store.config.section(FIELD))
    for name in sorted(store.names()):
        module, _, part = name.rpartition(".")
        if module.endswith(".experts") and part.startswith(("gate_up_proj", "down_proj")) and "bias" not in part:
            packed, should = part.endswith(("_blocks", "_scales")), unconverted.match(module) is None
            if packed != should:
                raise CheckpointError(
                    f"{name} in {store.folder} is {'' if packed else 'not '}in MXFP4, and {FIELD} in config.json says "
                    f"that {module} is{'' if should else ' not'}. Use weights and config.json from the same model."
                )


def take_blocks(weights: ScopedWeights, name: str, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks uint8 [E, N, K / 32, 16], with the first of two numbers in the low bits, and scales uint8
    [E, N, K / 32] of the weight with this name and shape (E, N, K). Raises CheckpointError."""
    *rows, columns = shape
    if columns % _BLOCK:
        raise CheckpointError(
            f"{name} in {weights.store.folder} must have blocks of {_BLOCK} inputs, and config.json says {columns} "
            "inputs. Use weights and config.json from the same model."
        )
    sizes = {f"{name}_blocks": (*rows, columns // _BLOCK, _BLOCK // 2), f"{name}_scales": (*rows, columns // _BLOCK)}
    for part in sizes:
        stored = weights.store.peek(weights.prefix + part)
        if stored.dtype != torch.uint8 or (part.endswith("_scales") and bool((stored == _NAN).any())):
            found = "NaN" if stored.dtype == torch.uint8 else str(stored.dtype)
            raise CheckpointError(
                f"{weights.prefix}{part} in {weights.store.folder} must be torch.uint8 without NaN ({_NAN} as a "
                f"scale), got {found}. Restore the file."
            )
    blocks, scales = (weights.take(part, *size, dtype=torch.uint8) for part, size in sizes.items())
    return blocks, scales


def widened(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, place: str) -> torch.Tensor:
    """Return the weight [E, N, K] in a wider dtype, one expert at a time, exactly but for numbers that the dtype cannot
    hold. Raises CheckpointError, which names the place of the weight, for numbers too large for it."""
    table = torch.tensor((*_MAGNITUDES, *(-size for size in _MAGNITUDES)), device=blocks.device)
    out = torch.empty(*blocks.shape[:2], blocks.shape[2] * _BLOCK, dtype=dtype, device=blocks.device)
    for weight, packed, scale in zip(out, blocks, scales.int(), strict=True):
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
        # The bits of a power of two in fp32, whose smallest, 2 ** -127, is a subnormal number.
        powers = torch.where(scale == 0, 1 << 22, scale << 23).view(torch.float32)
        weight.copy_((table[codes] * powers[..., None]).flatten(-2))
    if not is_finite(out):
        raise CheckpointError(f"{place} has numbers too large for {dtype}. {wider(dtype)}")
    return out
