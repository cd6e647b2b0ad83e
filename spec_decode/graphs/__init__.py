"""CUDA graph capture and replay, and their emulation on the CPU."""

from spec_decode.graphs.manager import (
    Capturable,
    CaptureReport,
    Factory,
    GraphKey,
    GraphManager,
    default_capture_sizes,
    loop_unsupported_reason,
    runtime_for,
)
from spec_decode.graphs.runtime import CaptureError, Graph, GraphRuntime, SplitOp

__all__ = [
    "Capturable",
    "CaptureError",
    "CaptureReport",
    "Factory",
    "Graph",
    "GraphKey",
    "GraphManager",
    "GraphRuntime",
    "SplitOp",
    "default_capture_sizes",
    "loop_unsupported_reason",
    "runtime_for",
]
