"""Capture, replay, and their emulation on the CPU."""

from spec_decode.graphs.manager import Capturable, CaptureReport, GraphKey, GraphManager
from spec_decode.graphs.runtime import CallOutside, CaptureError, Graph, GraphRuntime
from spec_decode.graphs.runtimes import loop_obstacle, runtime_for

__all__ = [
    "CallOutside",
    "Capturable",
    "CaptureError",
    "CaptureReport",
    "Graph",
    "GraphKey",
    "GraphManager",
    "GraphRuntime",
    "loop_obstacle",
    "runtime_for",
]
