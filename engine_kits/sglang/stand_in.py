"""SGLang's Python on a machine without a GPU: torch reports an H200, and kernels are replaced by stand-ins."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from engine_kits.kernels import stand_in_for
from engine_kits.launches import OnTheDevice, launch_in_order, record_launches
from engine_kits.sglang import pictures

STEPS = 5
"""Tokens that a round drafts. SGLang has a backend for each but the last, which is only sampled."""
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # there is nothing to compile for
}
_KERNELS = ("sgl_kernel", "flash_mla", "flashinfer", "deep_gemm")
_SERVER = ("fastapi", "prometheus_client", "setproctitle", "torchao", "uvicorn", "uvloop")
"""What the module of a model's runner imports, and no builder calls."""
_PROPERTIES = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=141 << 30, warp_size=32
)
_CUDA_ANSWERS: dict[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_name": lambda device=None: "NVIDIA H200",
    "get_device_properties": lambda device=None: _PROPERTIES,
    "is_current_stream_capturing": lambda: False,
    "mem_get_info": lambda device=None: (141 << 30, 141 << 30),
}


@contextmanager
def on_an_h200() -> Iterator[None]:
    """Make torch report an H200 for a block, and create on the CPU the tensors requested on it."""
    with ExitStack() as patches:
        for name, answer in _CUDA_ANSWERS.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, answer))
        patches.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
        patches.enter_context(_OnTheCpu())
        yield


class _OnTheCpu(OnTheDevice):
    """Creates on the CPU what SGLang creates on the device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        return super().__torch_function__(func, types, args, kwargs)


def enter() -> None:
    """Make SGLang importable here, and publish the configuration of a server that drafts. Once per process."""
    if "sglang" in sys.modules:
        return
    record_launches()
    launch_in_order()
    os.environ.update(_ENVIRONMENT)
    warnings.filterwarnings("ignore", "Triton is not supported on current platform")  # as on a machine without a GPU
    do_without_kernels()


def do_without_kernels() -> None:
    """Do the same where torch finds a GPU, but SGLang's compiled kernels and its server are not installed."""
    stand_in_for(*_KERNELS, *_SERVER)
    pictures.do_without()
    _publish()


@cache
def _publish() -> None:
    with on_an_h200():
        from sglang.srt.runtime_context import get_context, get_parallel

        get_context().override_server_args(
            speculative_algorithm="EAGLE",
            speculative_num_steps=STEPS,
            speculative_eagle_topk=1,
            speculative_num_draft_tokens=STEPS + 1,
        ).install()
        get_parallel().override_permanently(attn_tp_rank=0, attn_dcp_rank=0, tp_rank=0)
