"""A backend of attn-backends as a vLLM backend class, which answers vLLM from the backend's capability record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, TypeVar

import torch

import attn_backends
from attn_backends import Feature
from attn_backends.engines.vllm.compat import (
    AttentionBackend,
    ChunkedLocalAttentionSpec,
    MultipleOf,
    SinkFullAttentionSpec,
    init_logger,
)
from attn_backends.engines.vllm.reasons import EIGHT_BITS, page_sizes, serves_blocks, serves_capability
from builders import AdvanceLevel, AttentionKind, AttentionSpec

PREFIX = "ATTN_BACKENDS_"
"""Prefix of their names in vLLM."""

B = TypeVar("B", bound="OurBackend")
_log = init_logger("vllm.attn_backends")


def log_update(name: str, reasons: Sequence[str]) -> None:
    """Log one line per backend: its draft metadata is updated in the graph, or why not, which vLLM itself omits."""
    if reasons:
        _log.info_once("%s rebuilds draft metadata for every step: %s.", name, "; ".join(reasons))
    else:
        _log.info_once("%s updates draft metadata in the graph.", name)


class UpdatedInGraph(AttentionBackend):
    """A vLLM backend with this library's builder, without the features that no check has tried an update with."""

    name: ClassVar[str]
    builder: ClassVar[type[Any]]

    @classmethod
    def get_name(cls) -> str:
        return cls.name

    @classmethod
    def get_builder_cls(cls) -> type[Any]:
        return cls.builder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """See vLLM, which calls this for every layer at start-up. Raises ValueError for layers whose batches vLLM
        rewrites before each build: an update in the graph would read the old lengths."""
        if isinstance(spec, (ChunkedLocalAttentionSpec, SinkFullAttentionSpec)):
            raise ValueError(
                f"{cls.name} supports neither chunked local attention nor static sink tokens, a layer has a "
                f"{type(spec).__name__}. Choose one of vLLM's own backends."
            )
        return super().customize_spec(spec)

    @classmethod
    def supports_dcp(cls) -> bool:
        return False

    @classmethod
    def supports_pcp(cls) -> bool:
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Return False: plans and launches are sized by the query lengths that the host knows."""
        return False


class OurBackend(UpdatedInGraph):
    """A vLLM backend over `ours`; builder and impl are vLLM classes over the same backend."""

    ours: ClassVar[attn_backends.AttentionBackend]
    impl: ClassVar[type[Any]]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @classmethod
    def get_impl_cls(cls) -> type[Any]:
        return cls.impl

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
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        sizes = cls.ours.capabilities.page_sizes
        if sizes.power_of_two or sizes.maximum is not None:
            return [*page_sizes(cls.ours)]
        return [MultipleOf(max(sizes.multiple_of, 16))]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return serves_capability(cls.ours, (capability.major, capability.minor))


class OurBuilder:
    """Mixin for a vLLM builder, over builders of `ours`: `inner` has one for causal batches, and one for blocks of
    draft tokens if `ours` serves them."""

    ours: ClassVar[attn_backends.AttentionBackend]

    def make_inner(self, spec: AttentionSpec, device: torch.device, config: Any, against: Sequence[str] = ()) -> None:
        """Make `inner` for a VllmConfig. Claims an update in the graph if `ours` has one and `against` is empty."""
        scheduler = config.scheduler_config
        self.max_seq_len: int = config.model_config.max_model_len
        self.serves_blocks = serves_blocks(self.ours)
        self.inner = {
            causal: self.ours.builder(
                replace(spec, causal=causal),
                device,
                max_reqs=scheduler.max_num_seqs,
                max_tokens=scheduler.max_num_batched_tokens,
                max_seq_len=self.max_seq_len,
            )
            for causal in ((True, False) if self.serves_blocks else (True,))
        }
        support = self.ours.builder.advance_support(spec, device)
        reasons = [*([] if support.level is AdvanceLevel.IN_GRAPH else [support.reason]), *against]
        self.supports_draft_decode_metadata_update = not reasons
        log_update(vllm_name(self.ours), reasons)


def vllm_name(ours: attn_backends.AttentionBackend) -> str:
    """Return vLLM's name for a backend of this library."""
    return f"{PREFIX}{ours.name.upper()}"


def classes_over(base: type[B], *names: str) -> Callable[[str], type[B]]:
    """Return base's module `__getattr__`, which makes the class of each of these registered backends on request."""
    by_title = {"".join(part.capitalize() for part in name.split("_")): name for name in names}

    def class_of(title: str) -> type[B]:
        if title not in by_title:
            raise AttributeError(f"module {base.__module__} has no attribute {title!r}")
        return class_over(base, title, by_title[title])  # type: ignore[arg-type]  # mypy takes no TypeVar for hashable

    return class_of


@cache
def class_over(base: type[B], title: str, name: str) -> type[B]:
    """Return the class of this title, in the module of its base: vLLM finds it again by both.

    Raises ImportError if its kernels' package is missing, which vLLM shows as the reason.
    """
    try:
        ours = attn_backends.get(name)
    except attn_backends.BrokenBackend as error:
        raise ImportError(str(error)) from error
    claims = ours.capabilities
    exact = torch.float8_e4m3fn in claims.kv_dtypes and not claims.quantises_queries
    eight_bits = EIGHT_BITS if exact and AttentionKind.MHA in claims.kinds else ()
    parts = {
        "name": vllm_name(ours),
        "supported_dtypes": [dtype for dtype in ours.capabilities.dtypes if dtype.itemsize == 2],
        "supported_kv_cache_dtypes": [*base.supported_kv_cache_dtypes, *eight_bits],
        "builder": type(f"{title}Builder", (base.builder,), {"ours": ours}),
        "impl": type(f"{title}Impl", (base.impl,), {"ours": ours}),
    }
    return type(title, (base,), {"ours": ours, "__module__": base.__module__, **parts})
