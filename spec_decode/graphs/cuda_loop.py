"""A CUDA graph that repeats its body while a device scalar is set: a WHILE node, built with NVIDIA's cuda.bindings.

graph:       first part -> WHILE node around the body
each part:   the captured operations -> set the node's condition from the scalar

Work that always runs goes before the node: an iteration of the node costs 5 to 8 us (on an H200), so a body should be
worth several times that.

https://docs.nvidia.com/cuda/cuda-c-programming-guide/#conditional-graph-nodes
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch

from builders.devices import on_device
from builders.kernels.triton_runtime import dependent_launch
from spec_decode.graphs.runtime import CaptureError

_MIN_VERSION = 13
"""Major version of cuda.bindings from which its calls take edge data, and of the CUDA driver that it needs."""
_SOURCE = b"""
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);

extern "C" __global__ void set_condition(unsigned long long handle, const int* continue_flag) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    cudaGraphSetConditional(handle, *continue_flag != 0);
}
"""


@cache
def unsupported_reason() -> str | None:
    """Return why no loop can be captured with the installed software, and the remedy; None if one can."""
    remedy = f"run pip install 'cuda-python>={_MIN_VERSION}'"
    try:
        version = str(import_module("cuda.bindings").__version__)
        _, nvrtc, runtime = _bindings()
    except ImportError as error:
        return f"a CUDA graph that loops needs the package cuda.bindings ({error}); {remedy}"
    if int(version.split(".")[0]) < _MIN_VERSION:
        return f"a CUDA graph that loops needs cuda.bindings {_MIN_VERSION} or later, found {version}; {remedy}"
    try:
        found = int(_done(runtime.cudaDriverGetVersion()))
        _done(nvrtc.nvrtcVersion())
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        return f"a CUDA graph that loops needs CUDA's driver and nvrtc, which cuda.bindings cannot use: {reason}"
    if found < _MIN_VERSION * 1000:
        served = f"{found // 1000}.{found % 1000 // 10}"
        return f"a CUDA graph that loops needs a driver for CUDA {_MIN_VERSION}.0, found one for {served}; update it"
    return None


class WhileGraph:
    """A graph that runs its first part, then its body for as long as `continue_flag`, int32 [1], is nonzero."""

    num_nodes: int | None = None

    def __init__(
        self,
        continue_flag: torch.Tensor,
        first: Callable[[], object],
        body: Callable[[], object],
        capture: Callable[[Callable[[], object]], torch.cuda.CUDAGraph],
    ) -> None:
        """capture: records a function with keep_graph=True; the graphs' memory is kept as long as the loop.

        Child graphs ran as fast as work captured directly into the node. Raises CaptureError if no loop is possible.
        """
        if reason := unsupported_reason():
            raise CaptureError(f"{reason}. No graph was made. Install it, or choose another strategy.")
        _, _, runtime = _bindings()
        self._device, self._continue_flag = continue_flag.device, continue_flag
        with torch.cuda.device(self._device):
            _done(runtime.cudaSetDevice(self._device.index))
            self._graph = _done(runtime.cudaGraphCreate(0))
            weakref.finalize(self, runtime.cudaGraphDestroy, self._graph).atexit = False
            self._handle = _done(runtime.cudaGraphConditionalHandleCreate(self._graph, 0, 0))
            # Compiled before the capture, during which no code can be loaded.
            kernel = _condition_kernel(self._device.index)

            def part(run: Callable[[], object]) -> None:
                run()
                self._set_condition(kernel)

            self._captured = [capture(partial(part, run)) for run in (first, body)]
            before, inside = (graph.raw_cuda_graph() for graph in self._captured)
            begun = _done(runtime.cudaGraphAddChildGraphNode(self._graph, None, 0, before))
            _done(runtime.cudaGraphAddChildGraphNode(self._add_while(begun), None, 0, inside))
            self._executable = _done(runtime.cudaGraphInstantiate(self._graph, 0))
            weakref.finalize(self, runtime.cudaGraphExecDestroy, self._executable).atexit = False
        self._launch = runtime.cudaGraphLaunch

    def replay(self) -> None:
        with on_device(self._device):
            (error,) = self._launch(self._executable, torch.cuda.current_stream(self._device).cuda_stream)
        if error:
            _done((error,))

    def _add_while(self, after: Any) -> Any:
        """Add the WHILE node after another node; return the graph that is its body."""
        _, _, runtime = _bindings()
        params = runtime.cudaGraphNodeParams()
        params.type = runtime.cudaGraphNodeType.cudaGraphNodeTypeConditional
        params.conditional.handle = self._handle
        params.conditional.type = runtime.cudaGraphConditionalNodeType.cudaGraphCondTypeWhile
        params.conditional.size = 1
        _done(runtime.cudaGraphAddNode(self._graph, [after], None, 1, params))
        return params.conditional.phGraph_out[0]

    def _set_condition(self, kernel: Any) -> None:
        """Launch the kernel that sets the condition, with programmatic dependent launch if that is on."""
        driver, _, _ = _bindings()
        config = driver.CUlaunchConfig()
        config.gridDimX = config.gridDimY = config.gridDimZ = 1
        config.blockDimX = config.blockDimY = config.blockDimZ = 1
        config.hStream = torch.cuda.current_stream(self._device).cuda_stream
        if dependent_launch(self._device)["PDL"]:
            early = driver.CUlaunchAttribute()
            early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            value = driver.CUlaunchAttributeValue()
            value.programmaticStreamSerializationAllowed = 1
            early.value = value
            config.attrs, config.numAttrs = [early], 1
        arguments = (int(self._handle), self._continue_flag.data_ptr()), (ctypes.c_ulonglong, ctypes.c_void_p)
        _done(driver.cuLaunchKernelEx(config, kernel, arguments, 0))


@cache
def _condition_kernel(device_index: int) -> Any:
    """Compile the kernel in the device's current context; its module is never unloaded."""
    driver, nvrtc, _ = _bindings()
    major, minor = torch.cuda.get_device_capability(device_index)
    program = _done(nvrtc.nvrtcCreateProgram(_SOURCE, b"set_condition.cu", 0, [], []))
    _done(nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=sm_{major}{minor}".encode()]))
    binary = b" " * _done(nvrtc.nvrtcGetCUBINSize(program))
    _done(nvrtc.nvrtcGetCUBIN(program, binary))
    return _done(driver.cuModuleGetFunction(_done(driver.cuModuleLoadData(binary)), b"set_condition"))


@cache
def _bindings() -> tuple[Any, Any, Any]:
    """Return cuda.bindings' modules driver, nvrtc and runtime."""
    driver, nvrtc, runtime = (import_module(f"cuda.bindings.{name}") for name in ("driver", "nvrtc", "runtime"))
    return driver, nvrtc, runtime


def _done(result: tuple[Any, ...]) -> Any:
    """Unpack the result of a call of the bindings: (), one value, or several. Raises CaptureError for an error code."""
    error, *values = result
    if int(error):
        raise CaptureError(f"a CUDA call for a looping graph failed: {error!r}. No graph was made.")
    return values[0] if len(values) == 1 else tuple(values)
