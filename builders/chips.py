"""The chips that this library's Triton kernels have run on, and those that they have only been compiled for."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

_log = logging.getLogger(__name__)


class Chip(NamedTuple):
    """A compiler's target, its compute capability as torch gives it, some cards, and what is known of the kernels."""

    target: str
    capability: tuple[int, int]
    cards: str
    evidence: str = "compiled, never run"


_RUN = "run, with reports"
CHIPS = (
    Chip("sm_80", (8, 0), "A100"),
    Chip("sm_86", (8, 6), "A10, RTX 30"),
    Chip("sm_89", (8, 9), "L4, L40S, RTX 40"),
    Chip("sm_90", (9, 0), "H100, H200", _RUN),
    Chip("sm_100", (10, 0), "B200"),
    Chip("sm_120", (12, 0), "RTX 50"),
)


def evidence_for(device: torch.device) -> str:
    """Return the target of a CUDA or ROCm device, such as sm_90 or gfx942, and what is known of the kernels there."""
    target = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    if torch.version.hip is not None:
        target = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    known = {chip.target: chip.evidence for chip in CHIPS}
    return f"{target}: {known.get(target, 'neither compiled nor run')}"


def warn_unless_run(device: torch.device) -> None:
    """Log a line if no kernel of this library has run on the device's chip."""
    if not (found := evidence_for(device)).endswith(_RUN):
        _log.warning("our Triton kernels on %s. Run `attn-backends check` first; it compares them with torch.", found)
