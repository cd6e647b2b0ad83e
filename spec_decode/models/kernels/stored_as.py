"""What a kernel stores to in place of its result where Triton's interpreter runs it."""

from __future__ import annotations

import torch


def stored_as(out: torch.Tensor) -> torch.Tensor:
    """out itself, or on the CPU fp32 of its shape: the interpreter truncates fp32 to bf16 where the hardware rounds.

    Converting what was stored to out's dtype is then torch's work.
    """
    return out.float() if out.device.type == "cpu" else out
