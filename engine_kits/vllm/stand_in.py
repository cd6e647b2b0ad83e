"""vLLM's Python on a machine without a GPU: a platform that reports an H200, and stand-ins for its kernels."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch

from engine_kits.kernels import KernelPackage, stand_in_for
from engine_kits.launches import launch_in_order, record_launches

_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # otherwise vLLM finds Triton without a driver and disables it
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE": str(1 << 20),  # nothing uses it
}
_EXTENSIONS = ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch")
_DEEP_GEMM = ("deep_gemm", "vllm.third_party.deep_gemm")
"""It has no schedule to make without a GPU, and vLLM runs without it."""
_OPS = ("_C", "_moe_C", "_C_cache_ops", "_C_utils", "_C_custom_ar", "_vllm_fa2_C", "_vllm_fa3_C", "_flashmla_C")


def enter() -> None:
    """Make vLLM importable here, and make it see the GPU. Call it once per process, before anything imports vllm."""
    if "vllm" in sys.modules:
        return
    record_launches()
    launch_in_order()
    os.environ.update(_ENVIRONMENT)
    for name in _EXTENSIONS:
        sys.modules[name] = ModuleType(name)
    absent: dict[str, Any] = dict.fromkeys(_DEEP_GEMM)
    sys.modules.update(absent)
    import vllm.platforms

    vars(vllm.platforms)["_current_platform"] = _platform()
    # Its ops are declared before their names are replaced.
    import vllm._custom_ops

    for name in _OPS:
        setattr(torch.ops, name, MagicMock(name=name))
    stand_in_for("flashinfer", "compressed_tensors")
    stand_in_for("vllm.vllm_flash_attn", kind=_FlashAttention)


class _FlashAttention(KernelPackage):
    """Available in version 3, as on Hopper."""

    FA2_AVAILABLE, FA3_AVAILABLE = False, True

    @staticmethod
    def is_fa_version_supported(version: int, device: object = None) -> bool:
        return version == 3

    @staticmethod
    def fa_version_unsupported_reason(version: int, device: object = None) -> str | None:
        return None if version == 3 else "it is not installed"


def _platform() -> Any:
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    hopper = (9, 0)

    def pair(capability: Any) -> Any:
        return capability if isinstance(capability, tuple) else divmod(capability, 10)

    facts = {
        "get_device_capability": lambda cls, device_id=0: DeviceCapability(*hopper),
        "has_device_capability": lambda cls, capability, device_id=0: pair(capability) <= hopper,
        "is_device_capability": lambda cls, capability, device_id=0: pair(capability) == hopper,
        "is_device_capability_family": lambda cls, capability, device_id=0: pair(capability)[0] == 9,
        "get_device_name": lambda cls, device_id=0: "NVIDIA H200",
        "get_device_total_memory": lambda cls, device_id=0: 141 << 30,
        "num_compute_units": lambda cls, device_id=0: 132,
        "device_count": lambda cls: 1,
        "is_fully_connected": lambda cls, ids: True,
        "is_pin_memory_available": lambda cls: False,
    }
    methods: dict[str, Any] = {name: classmethod(fact) for name, fact in facts.items()}  # type: ignore[arg-type]
    return type("StandInH200", (NonNvmlCudaPlatform,), methods)()
