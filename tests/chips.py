"""Compiling kernels for GPUs that this machine does not have: each op's own launch runs on tensors without memory, as
if they were on that GPU, and Triton compiles what it launches without running it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from builders.chips import Chip
from builders.devices import Room
from tests.import_graph import module_files

_REGISTERS = 1 << 16
"""Of an SM."""
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


LIMITS = {
    target: Room(sms, kib * 1024)
    for target, sms, kib in (
        ("sm_80", 108, 163),
        ("sm_86", 72, 99),
        ("sm_89", 58, 99),
        ("sm_90", 132, 227),
        ("sm_100", 148, 227),
        ("sm_120", 170, 99),
    )
}
"""The SMs of a card of each chip, and its shared memory per block."""


@dataclass
class Compiled:
    """A kernel compiled for a chip."""

    name: str
    kernel: Any

    @property
    def shared(self) -> int:
        """Bytes of shared memory per block."""
        return int(self.kernel.metadata.shared)

    @property
    def spilled(self) -> int:
        """Bytes of a thread's registers that are kept in memory."""
        return self._used("STACK")

    def resident(self, room: Room) -> int:
        """Return how many programs an SM has registers and shared memory for, of which each takes 1 KiB more than it
        asks for, and can ask for all but that."""
        registers = -(-self._used("REG") // 8) * 8 * 32 * int(self.kernel.metadata.num_warps)
        return min(_REGISTERS // registers, (room.shared_memory + 1024) // (self.shared + 1024))

    def _used(self, what: str) -> int:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(self.kernel.asm["cubin"])
            command = [str(_CUOBJDUMP), "--dump-resource-usage", file.name]
            listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return int(re.findall(rf"{what}:(\d+)", listed)[0])


@cache
def _records() -> dict[str, Any]:
    """Return the record that each op is defined with, by the op's name."""
    defined = re.compile(r'define_op\(\s*"([\w:]+)",\s*(\w+)')
    sources = {module: path.read_text(encoding="utf-8") for module, path in module_files().items()}
    return {
        op: getattr(import_module(module), record)
        for module, text in sources.items()
        for op, record in defined.findall(text)
    }


class _OnTheChip(TorchFunctionMode):
    """Shows meta tensors as CUDA tensors of one device, allocates on "meta" what is asked for there, and launches our
    ops."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and (record := _records().get(func._schema.name)):
            with self:
                return record(*args).launch()
        if func == torch.Tensor.device.__get__:
            return self.device
        if func == torch.Tensor.is_cuda.__get__:
            return True
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def compile_op(chip: Chip, op: str, arguments: Sequence[Any]) -> list[Compiled]:
    """Return the kernels that the op launches on a chip with these arguments, compiled for it."""
    with on_chip(chip) as found:
        _records()[op](*tree_map_only(torch.Tensor, lambda part: part.to("meta"), list(arguments))).launch()
    return found


@contextmanager
def on_chip(chip: Chip) -> Iterator[list[Compiled]]:
    """Take tensors on "meta" for tensors on a chip, and yield the list that the kernels launched on them are added to,
    compiled."""
    device = torch.device("cuda", list(LIMITS).index(chip.target))
    room = LIMITS[chip.target]
    target = GPUTarget("cuda", int(chip.target.removeprefix("sm_")), 32)
    found: list[Compiled] = []
    run = JITFunction.run

    def compiled(function: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append(Compiled(function.fn.__name__, run(function, *args, grid=grid, warmup=True, **options)))

    properties = SimpleNamespace(
        multi_processor_count=room.num_sms,
        shared_memory_per_block_optin=room.shared_memory,
        major=chip.capability[0],
    )
    active = SimpleNamespace(
        get_current_device=lambda: device.index,
        get_current_stream=lambda index: 0,
        get_current_target=lambda: target,
    )
    with (
        patch.object(torch.cuda, "get_device_properties", lambda device: properties),
        patch.object(torch.cuda, "get_device_capability", lambda device: chip.capability),
        patch.object(JITFunction, "run", compiled),
        patch.object(driver, "_active", active),
        _OnTheChip(device),
    ):
        yield found
