"""A backend of attn-backends as a class of vLLM's: what vLLM asks of a backend, answered from our record of it."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar, TypeVar

from vllm.v1.attention.backend import AttentionBackend, MultipleOf

import attn_backends
from attn_backends import Feature
from engines.vllm.v0_33.reasons import page_sizes, serves_blocks, serves_capability

PREFIX = "ATTN_BACKENDS_"
"""Of vLLM's names for them."""

B = TypeVar("B", bound="OurBackend")


class OurBackend(AttentionBackend):
    """Over `ours`; builder and impl are classes of vLLM's too, over the same."""

    ours: ClassVar[attn_backends.AttentionBackend]
    builder: ClassVar[type[Any]]
    impl: ClassVar[type[Any]]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @classmethod
    def get_name(cls) -> str:
        return vllm_name(cls.ours)

    @classmethod
    def get_impl_cls(cls) -> type[Any]:
        return cls.impl

    @classmethod
    def get_builder_cls(cls) -> type[Any]:
        return cls.builder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in cls.ours.capabilities.head_dims

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return Feature.SLIDING_WINDOW in cls.ours.capabilities.features

    @classmethod
    def supports_sink(cls) -> bool:
        return Feature.SINKS in cls.ours.capabilities.features

    @classmethod
    def supports_non_causal(cls) -> bool:
        return serves_blocks(cls.ours)

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: a launch is sized by the longest query that the host knows of."""
        return False

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        sizes = cls.ours.capabilities.page_sizes
        if sizes.power_of_two or sizes.maximum is not None:
            return [*page_sizes(cls.ours)]
        return [MultipleOf(max(sizes.multiple_of, 16))]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return serves_capability(cls.ours, (capability.major, capability.minor))


def vllm_name(ours: attn_backends.AttentionBackend) -> str:
    """The name that vLLM knows one of our backends by."""
    return f"{PREFIX}{ours.name.upper()}"


def class_name(name: str) -> str:
    """Of vLLM's class over our backend of this name."""
    return "".join(part.capitalize() for part in name.split("_"))


def class_over(base: type[B], ours: attn_backends.AttentionBackend) -> type[B]:
    """A class of vLLM's over one of our backends, in the module of its base: vLLM finds it again by both."""
    title = class_name(ours.name)
    supported = [dtype for dtype in ours.capabilities.dtypes if dtype.itemsize == 2]
    parts = {
        "builder": type(f"{title}Builder", (base.builder,), {"ours": ours}),
        "impl": type(f"{title}Impl", (base.impl,), {"ours": ours}),
    }
    return type(title, (base,), {"ours": ours, "supported_dtypes": supported, "__module__": base.__module__, **parts})


@cache
def class_named(base: type[B], name: str) -> type[B]:
    """The class over the backend that is registered with attn-backends by this name.

    Raises ImportError where its kernels' package is missing, which vLLM shows as the reason.
    """
    try:
        ours = attn_backends.get(name)
    except attn_backends.BrokenBackend as error:
        raise ImportError(str(error)) from error
    return class_over(base, ours)
