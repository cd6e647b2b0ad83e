"""The adapters for vLLM over classes that stand for whatever they import of it: enough to load them."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any

from attn_backends.engines.vllm import NAMES, compat


class AnyName(type):
    """A class whose attributes are such classes too; a call with arguments returns it, as if it made something."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyName(name, (), {})

    def __getitem__(cls, item: Any) -> AnyName:
        return cls

    def __call__(cls, *given: Any) -> Any:
        return cls


def load_adapters() -> None:
    """Load what every vLLM loads, the validator, and every backend whose kernels' package is installed."""
    vars(compat)["__getattr__"] = lambda name: AnyName(name, (), {})
    for module in ("validator", "quantization", "engine_config"):
        import_module(f"attn_backends.engines.vllm.{module}")
    for path in NAMES.values():
        module, _, title = path.rpartition(".")
        with suppress(ImportError):
            getattr(import_module(module), title)


def load_linear_methods() -> None:
    """Load what one of the quantizations adds, once a model chooses it."""
    load_adapters()
    import_module("attn_backends.engines.vllm.linear_methods")
