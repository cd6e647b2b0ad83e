"""FlashAttention-3's kernels behind one interface, from any package that provides them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from attn_backends.base import Sinks
from attn_backends.capabilities import Feature, Sizes
from attn_backends.extras import install_hint
from attn_backends.kv_cache import KVCache
from builders import AttentionSpec, BatchError
from builders.flash_attn3 import FlashAttn3Metadata

PROVIDER_VARIABLE = "ATTN_BACKENDS_FA3_PROVIDER"

_LSE = "return_softmax_lse"
"""The argument with which every entry returns the lse; a build without it serves no trees."""

_SINKS = ("sinks", "s_aux")
"""Names that builds give to the argument for sinks, in bf16; a build with neither does not take sinks."""

_LATENT_QUERY = ("qv", "q_v")
"""Names that builds give to the argument for queries against the values, whose products are added to the scores."""

_DESCALES = ("k_descale", "v_descale")
"""Arguments for the scales of an e4m3 cache, fp32 [num_reqs, num_kv_heads] with any strides."""

_UPSTREAM_PARTS = {
    Feature.SLIDING_WINDOW: {"LOCAL"},
    Feature.SOFT_CAP: {"SOFTCAP"},
    Feature.VALUE_DIM: {"HDIMDIFF64", "HDIMDIFF192"},
}


class BrokenProvider(RuntimeError):
    """A provider that is installed and does not work; the message names it and quotes its error."""


class Provider:
    """One package's FlashAttention-3: attention of ragged queries over a paged cache.

    Raises BrokenProvider for a module without FlashAttention-3, or whose entry lacks an argument needed here.
    """

    name: ClassVar[str]
    module: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    """Distributions that contain it; the first is the one to install."""
    library: ClassVar[str] = "*.so"
    """Glob pattern of its compiled kernels, relative to the module's folder."""
    remedy: ClassVar[str]
    entry: ClassVar[str]
    inputs: ClassVar[tuple[str, str, str, str]]
    """The entry's names for keys, values, their lengths and the block table."""
    needs: ClassVar[tuple[str, ...]]
    """Further arguments that older builds of the entry lack."""

    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    kv_dtypes: tuple[torch.dtype, ...] = (torch.float8_e4m3fn,)
    # A head dim without its own kernel is padded to the next that has one.
    head_dims: Sizes = Sizes(minimum=16, maximum=256, multiple_of=8)
    # Pages that are a multiple of the kernel's tile are read whole, past the last token: on an H200, with pages of 128
    # or more, NaN there reached the output of a prefill.
    page_sizes: Sizes = Sizes(maximum=64)
    features: frozenset[Feature] = frozenset(Feature) - {Feature.BATCH_INVARIANT, Feature.HEAD_SCALES}

    def __init__(self, module: ModuleType) -> None:
        attend: Callable[..., Any] | None = getattr(module, self.entry, None)
        if attend is None:
            raise BrokenProvider(f"it has no {self.entry}")
        arguments = signature(attend).parameters
        if missing := [name for name in (*self.inputs, *self.needs) if name not in arguments]:
            raise BrokenProvider(f"its {self.entry} lacks {', '.join(missing)}: it is too old or different")
        self.sinks = next((name for name in _SINKS if name in arguments), None)
        if self.sinks is None:
            self.features -= {Feature.SINKS}
        self.latent_query = next((name for name in _LATENT_QUERY if name in arguments), None)
        if not {*_DESCALES} <= {*arguments}:
            self.kv_dtypes = ()
        if _LSE not in arguments:
            self.features -= {Feature.TREE}
        self._attend = attend
        self._folder = Path(getattr(module, "__file__", None) or "/nonexistent/module").parent

    @property
    def serves_latents(self) -> bool:
        """Whether `attend_to_latents` runs."""
        return self.latent_query is not None and Feature.VALUE_DIM in self.features

    @property
    def version(self) -> str:
        """Package and version, for provenance."""
        return package_version(*self.packages, kernels=self._folder, pattern=self.library)

    def attend(
        self, query: Tensor, cache: KVCache, metadata: FlashAttn3Metadata, spec: AttentionSpec, *, sinks: Sinks = None
    ) -> Tensor:
        """Compute attention over a paged cache; returns [num_tokens, num_q_heads, value_dim].

        query  [num_tokens, num_q_heads, head_dim]
        sinks  fp32 [num_q_heads], rounded to bf16, which the kernels read

        Raises BatchError for sinks that the build does not take.
        """
        extra = {}
        if sinks is not None:
            if self.sinks is None:
                raise BatchError(
                    f"sinks need a FlashAttention-3 build that supports them, {self.version} does not. Set another "
                    f"provider in {PROVIDER_VARIABLE}."
                )
            extra[self.sinks] = sinks.to(torch.bfloat16)
        out: Tensor = self._call(query, cache, metadata, spec, causal=spec.causal, **extra)
        return out

    def attend_to_prefix(
        self, query: Tensor, cache: KVCache, metadata: FlashAttn3Metadata, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """Compute attention of trees to their cached prefix, without sinks, and its lse.

        query  [num_tokens, num_q_heads, head_dim]

        Returns out [num_tokens, num_q_heads, value_dim], and lse fp32 [num_q_heads, num_tokens]: the natural logarithm
        of the sum of exp(score). For an empty prefix they are 0 and -inf.
        """
        out, lse, *_ = self._call(query, cache, metadata, spec, causal=False, **{_LSE: True})
        return out, lse

    def attend_to_latents(
        self, query: Tensor, cache: KVCache, metadata: FlashAttn3Metadata, spec: AttentionSpec
    ) -> Tensor:
        """Compute attention over paged latents, if the build serves them; returns [num_tokens, num_q_heads, value_dim].

        query  [num_tokens, num_q_heads, head_dim]: the latent's value_dim dims, then the rotary ones

        A score is the sum of two products: the rotary dims of query and key, and the others with the value.
        """
        assert self.latent_query is not None
        latent, rotary = query[..., : spec.out_dim], query[..., spec.out_dim :]
        keys = KVCache(cache.key[..., spec.out_dim :], cache.value)
        extra = {self.latent_query: latent}
        out: Tensor = self._call(rotary, keys, metadata, spec, causal=spec.causal, **extra)
        return out

    def _call(
        self,
        query: Tensor,
        cache: KVCache,
        metadata: FlashAttn3Metadata,
        spec: AttentionSpec,
        *,
        causal: bool,
        **extra: Any,
    ) -> Any:
        inputs = (cache.key, cache.value, metadata.kv_lens, metadata.block_table)
        if cache.scales is not None:
            by_request = metadata.num_reqs, spec.num_kv_heads
            scales = (scale.expand(by_request) for scale in (cache.scales.key, cache.scales.value))
            extra |= zip(_DESCALES, scales, strict=True)
        return self._attend(
            q=query,
            **dict(zip(self.inputs, inputs, strict=True)),
            **self._extra_arguments(metadata),
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_q=metadata.max_query_len,
            softmax_scale=spec.softmax_scale,
            causal=causal,
            window_size=(spec.window_left, 0 if causal and spec.sliding_window is not None else -1),
            softcap=spec.soft_cap or 0.0,
            num_splits=metadata.num_splits,
            **extra,
        )

    def _extra_arguments(self, metadata: FlashAttn3Metadata) -> dict[str, Any]:
        """Return arguments that the other entries do not take."""
        return {}


class Vllm(Provider):
    """The build in vLLM's wheel. Raises BrokenProvider if it lacks FlashAttention-3."""

    name = "vllm"
    module = "vllm.vllm_flash_attn.flash_attn_interface"
    packages = ("vllm",)
    remedy = install_hint("vllm")
    entry = "flash_attn_varlen_func"
    inputs = ("k", "v", "seqused_k", "block_table")
    needs = ("num_splits", "fa_version")

    def __init__(self, module: ModuleType) -> None:
        if not getattr(module, "FA3_AVAILABLE", False):
            reason = getattr(module, "FA3_UNAVAILABLE_REASON", None)
            raise BrokenProvider(f"it lacks FlashAttention-3: {reason}")
        super().__init__(module)

    def _extra_arguments(self, metadata: FlashAttn3Metadata) -> dict[str, Any]:
        return {"max_seqlen_k": metadata.max_seq_len, "fa_version": 3}


class _WithKVCache(Provider):
    """The entry that upstream and sglang share. It takes no bound on seq_lens: the block table's width is the bound."""

    entry = "flash_attn_with_kvcache"
    inputs = ("k_cache", "v_cache", "cache_seqlens", "page_table")
    needs = ("cu_seqlens_q", "max_seqlen_q", "num_splits")


class Upstream(_WithKVCache):
    """Dao-AILab's sources, as tokenspeed-fa3 or built by hand. Builds can omit parts, which flash_attn_config records.

    Raises BrokenProvider for a build without a part that every call needs.
    """

    name = "upstream"
    module = "flash_attn_interface"
    packages = ("tokenspeed-fa3", "flash-attn-3")
    library = "flash_attn_3/_C*.so"
    remedy = install_hint("flash-attn")

    def __init__(self, module: ModuleType) -> None:
        super().__init__(module)
        disabled = _disabled_parts()
        if missing := {"PAGEDKV", "VARLEN", "SPLIT"} & disabled:
            raise BrokenProvider(f"it was built without {', '.join(sorted(missing))}")
        self.features -= {feature for feature, parts in _UPSTREAM_PARTS.items() if parts & disabled}
        self.dtypes = self.dtypes[:1] if "FP16" in disabled else self.dtypes
        self.kv_dtypes = () if "FP8" in disabled else self.kv_dtypes
        max_head_dim = max((dim for dim in (64, 96, 128, 192, 256) if f"HDIM{dim}" not in disabled), default=0)
        self.head_dims = Sizes(minimum=16, maximum=max_head_dim, multiple_of=8)


class Sgl(_WithKVCache):
    """The build in sglang's kernel package."""

    name = "sgl"
    module = "sgl_kernel.flash_attn"
    packages = ("sglang-kernel", "sgl-kernel")
    remedy = "pip install sglang-kernel (sgl-kernel before 0.4)"


def package_version(*packages: str, kernels: Path, pattern: str = "*.so") -> str:
    """Return the first of these packages that is installed, with its version, for provenance.

    Kernels unpacked without their wheel's metadata have no version; they are identified by the digest of the library
    that matches `pattern` in the folder `kernels`.
    """
    for package in packages:
        try:
            return f"{package} {version_of(package)}"
        except PackageNotFoundError:
            continue
    for library in sorted(kernels.glob(pattern)):
        digest = hashlib.sha256(library.read_bytes()).hexdigest()[:12]
        return f"{packages[0]} without its wheel's metadata ({library.name}, sha256 {digest})"
    return f"{packages[0]} of unknown version"


PROVIDERS: tuple[type[Provider], ...] = (Upstream, Vllm, Sgl)
"""In search order."""


def find_provider() -> Provider:
    """Return the provider that PROVIDER_VARIABLE names, or else the first that is installed.

    Raises ImportError if the named one, or every one, is absent; BrokenProvider if the one found does not work (there
    is no fallback to another); ValueError for an unknown name.
    """
    pinned, kinds = os.environ.get(PROVIDER_VARIABLE), {kind.name: kind for kind in PROVIDERS}
    if pinned and pinned not in kinds:
        raise ValueError(
            f"{PROVIDER_VARIABLE} must be one of {', '.join(kinds)}, got {pinned!r}. Set one of these, or unset it to "
            "use the first installed one"
        )
    for kind in (kinds[pinned],) if pinned else PROVIDERS:
        if (provider := load_provider(kind)) is not None:
            return provider
    if pinned:
        raise ImportError(
            f"{kinds[pinned].module}, which {PROVIDER_VARIABLE}={pinned} pins, is not installed: {kinds[pinned].remedy}"
        )
    raise ImportError(f"FlashAttention-3 is not installed: {PROVIDERS[0].remedy}")


def load_provider(kind: type[Provider]) -> Provider | None:
    """Return the provider, or None if its package is absent. Raises BrokenProvider if it is there but does not work."""
    package = kind.module.partition(".")[0]
    try:
        import_module(package)
        return kind(import_module(kind.module))
    except Exception as error:  # a broken build can raise anything; its message becomes the reason
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            return None
        message = str(error) if isinstance(error, BrokenProvider) else f"{type(error).__name__}: {error}"
        raise BrokenProvider(
            f"{kind.name} ({kind.module}) is installed but cannot be used: {message}; no other provider was tried. "
            f"Repair or remove it, or name another of {', '.join(k.name for k in PROVIDERS)} in {PROVIDER_VARIABLE}"
        ) from error


def _disabled_parts() -> set[str]:
    """Return the parts that upstream's build omits; without a record it counts as complete except for value dims."""
    try:
        config = import_module("flash_attn_config").CONFIG
    except ModuleNotFoundError:
        return _UPSTREAM_PARTS[Feature.VALUE_DIM]
    flags: dict[str, bool] = config["build_flags"]
    return {name.partition("_DISABLE_")[2] for name, value in flags.items() if value and "_DISABLE_" in name}
