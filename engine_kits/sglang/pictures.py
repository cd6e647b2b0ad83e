"""Stand-in for torchvision, which SGLang imports for images and never calls for a draft."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

_PICTURES = ("torchvision", *(f"torchvision.{name}" for name in ("io", "transforms")))
_PICTURES += ("torchvision.transforms.functional", "torchvision.transforms.v2")


class _Nothing(ModuleType):
    """A package whose attributes are all packages too."""

    def __getattr__(self, name: str) -> ModuleType:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(f"{self.__name__}.{name}")

    def __call__(self, *args: object, **named: object) -> _Nothing:
        return self


def do_without() -> None:
    """Install the stand-in. Call it once per process, before anything imports sglang."""
    if "sglang" in sys.modules:
        return
    # transformers checks for torchvision, and must not find the stand-in.
    from transformers import AutoImageProcessor, AutoModel, AutoProcessor, PreTrainedModel  # noqa: F401

    for name in _PICTURES:
        module = _Nothing(name)
        module.__path__ = []
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        sys.modules.setdefault(name, module)
