"""The KV cache of a layer, and the layouts in which caches store tokens: the spec chooses one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_backends.kernels import fp8_ds_mla
from attn_backends.kernels.write_kv import Scales, check_new_kv, write_kv
from attn_backends.kernels.write_latent import KvANormRope, write_latent
from attn_backends.kv_scales import KVScales, check_scales
from builders import AttentionKind, AttentionSpec, BatchError
from builders.errors import require_tensor


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys [num_pages, page_size, num_kv_heads, head_dim] and values [..., value_dim]: views with any strides whose
    last dim is contiguous. The allocator decides the strides; an adapter never copies them.

    If keys and values are one latent, the values are a view of the keys. An fp8_ds_mla cache holds bytes, uint8
    [num_pages, page_size, 1, bytes per token], in both, with a page's bytes adjacent; there can be gaps between pages.
    scales: of keys and values in float8_e4m3fn, which mean nothing without; None in every other cache.
    """

    key: Tensor
    value: Tensor
    scales: KVScales | None = None

    @property
    def key_scale(self) -> Tensor | None:
        """fp32 [1] or [num_kv_heads], or None."""
        return None if self.scales is None else self.scales.key

    @property
    def value_scale(self) -> Tensor | None:
        """fp32 [1] or [num_kv_heads], or None."""
        return None if self.scales is None else self.scales.value

    @property
    def both_scales(self) -> Scales | None:
        """Those of keys and of values."""
        return None if self.scales is None else (self.scales.key, self.scales.value)

    @property
    def num_pages(self) -> int:
        return self.key.shape[0]

    @property
    def latent(self) -> bool:
        """Whether the values are a view of the keys."""
        return self.key.data_ptr() == self.value.data_ptr()

    @property
    def layout(self) -> CacheLayout:
        """How it stores tokens, as far as the tensors tell: the layout of every spec that it can serve."""
        if self.key.data_ptr() != self.value.data_ptr():  # not `self.latent`: this runs at every write
            return PLAIN
        return FP8_DS_MLA if self.key.dtype is torch.uint8 else LATENT

    @property
    def latents(self) -> Tensor:
        """The latents [num_pages, page_size, head_dim]; for fp8_ds_mla each page's bytes [num_pages, page_bytes]."""
        return self.layout.latents(self)


class CacheLayout:
    """How a cache stores tokens. This one: keys and values, each in its own tensor, in the spec's dtype."""

    def unsupported_reasons(self, spec: AttentionSpec) -> list[str]:
        """Return why it cannot store the spec's tokens; empty if it can."""
        return []

    def token(self, spec: AttentionSpec) -> tuple[int, int, torch.dtype]:
        """Return the last dims of the cache's key and value, and their dtype."""
        return spec.head_dim, spec.out_dim, spec.cache_dtype

    def allocate(self, spec: AttentionSpec, num_pages: int, device: torch.device) -> KVCache:
        """Allocate an uninitialised cache, without scales."""
        *dims, dtype = self.token(spec)
        shape = (num_pages, spec.page_size, spec.num_kv_heads)
        key, value = (torch.empty(*shape, dim, dtype=dtype, device=device) for dim in dims)
        return KVCache(key, value)

    def check(self, cache: KVCache, spec: AttentionSpec, device: torch.device) -> None:
        """Raise BatchError for a cache whose shape, dtype, device, strides or scales are not those of the spec."""
        check_scales(cache.scales, spec, device)
        key_dim, value_dim, dtype = self.token(spec)
        for name, tensor, dim in (("key cache", cache.key, key_dim), ("value cache", cache.value, value_dim)):
            pages = (None, spec.page_size, spec.num_kv_heads, dim)
            require_tensor(name, tensor, shape=pages, dtype=dtype, device=device)
            if tensor.stride(-1) != 1:
                raise BatchError(
                    f"the last dim of the {name} must be contiguous, got strides {tuple(tensor.stride())}; a kernel "
                    "would read the wrong elements. Keep the head dim innermost."
                )

    def check_new(self, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        """Raise BatchError for new keys and values that do not fit the cache."""
        check_new_kv(key, value, cache.key, cache.value, slot_mapping, cache.both_scales)

    def write(self, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        """Store new keys and values; see `AttentionBackend.write_kv`. Raises BatchError, and writes nothing, for
        tensors that do not fit."""
        write_kv(key, value, cache.key, cache.value, slot_mapping, cache.both_scales)

    def latents(self, cache: KVCache) -> Tensor:
        """Return what a kernel over latents reads: the keys of the only head."""
        return cache.key[:, :, 0]

    def write_latent(
        self, latent: Tensor, cache: KVCache, slot_mapping: Tensor, norm_rope: KvANormRope | None = None
    ) -> None:
        """Store latent [num_tokens, head_dim], after norm_rope if given. Raises BatchError as `write` does."""
        write_latent(latent, cache.key, slot_mapping, norm_rope=norm_rope)


class LatentLayout(CacheLayout):
    """One latent per token, in the spec's dtype: it is the key, and the value is a view of it."""

    def allocate(self, spec: AttentionSpec, num_pages: int, device: torch.device) -> KVCache:
        shape = (num_pages, spec.page_size, 1, spec.head_dim)
        key = torch.empty(shape, dtype=spec.cache_dtype, device=device)
        return KVCache(key, key[..., : spec.out_dim])

    def check_new(self, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        """Raise BatchError for keys that are not new latents of the cache."""
        dim, dtype = self._new_latent(cache)
        require_tensor("key", key, shape=(len(slot_mapping), 1, dim), dtype=dtype, device=cache.key.device)

    def _new_latent(self, cache: KVCache) -> tuple[int, torch.dtype]:
        """Return the dim and dtype of a latent before it is stored."""
        return cache.key.shape[-1], cache.key.dtype

    def write(self, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        """Store the keys. Raises BatchError, and writes nothing, for tensors that do not fit."""
        if key.dim() != 3 or key.shape[1] != 1:
            raise BatchError(
                f"a latent cache takes one per token, got keys {list(key.shape)}; the others would be lost. Pass keys "
                "[num_tokens, 1, head_dim]."
            )
        self.write_latent(key[:, 0], cache, slot_mapping)


class Fp8DsMla(LatentLayout):
    """Latents as bytes in DeepSeek-V4's format: see kernels/fp8_ds_mla.py."""

    def unsupported_reasons(self, spec: AttentionSpec) -> list[str]:
        dim = fp8_ds_mla.LATENT
        if (spec.head_dim, spec.out_dim, spec.dtype) == (dim, dim, torch.bfloat16):
            return []
        return [
            f"fp8_ds_mla latents have {dim} dims, all of them the value, and bfloat16 queries, got {spec.head_dim} and "
            f"{spec.out_dim} dims and {spec.dtype}"
        ]

    def token(self, spec: AttentionSpec) -> tuple[int, int, torch.dtype]:
        return fp8_ds_mla.TOKEN_BYTES, fp8_ds_mla.TOKEN_BYTES, torch.uint8

    def allocate(self, spec: AttentionSpec, num_pages: int, device: torch.device) -> KVCache:
        size, token = fp8_ds_mla.page_bytes(spec.page_size), fp8_ds_mla.TOKEN_BYTES
        pages = torch.empty(num_pages, size, dtype=torch.uint8, device=device)
        latents = pages.as_strided((num_pages, spec.page_size, 1, token), (size, token, token, 1))
        return KVCache(latents, latents)

    def latents(self, cache: KVCache) -> Tensor:
        """Return the bytes of each page. Raises BatchError if they are not adjacent."""
        (_, page_size, *_), (stride, between_tokens, *_) = cache.key.shape, cache.key.stride()
        if page_size != 1 and between_tokens != fp8_ds_mla.TOKEN_BYTES:
            raise BatchError(
                f"the tokens of an fp8_ds_mla page must be {fp8_ds_mla.TOKEN_BYTES} bytes apart, got strides "
                f"{cache.key.stride()}; a page holds their scales together. Leave gaps between pages only."
            )
        return cache.key.as_strided((cache.num_pages, min(stride, fp8_ds_mla.page_bytes(page_size))), (stride, 1))

    def _new_latent(self, cache: KVCache) -> tuple[int, torch.dtype]:
        return fp8_ds_mla.LATENT, torch.bfloat16

    def write_latent(
        self, latent: Tensor, cache: KVCache, slot_mapping: Tensor, norm_rope: KvANormRope | None = None
    ) -> None:
        from attn_backends.kernels.write_fp8_ds_mla import write_fp8_ds_mla

        page_size = cache.key.shape[1]
        write_fp8_ds_mla(latent, self.latents(cache), slot_mapping, page_size=page_size, norm_rope=norm_rope)


PLAIN, LATENT = CacheLayout(), LatentLayout()
FP8_DS_MLA = Fp8DsMla()
"""DeepSeek-V4's bytes: a spec's cache holds them if `cache_layout(spec) is FP8_DS_MLA`."""


def cache_layout(spec: AttentionSpec) -> CacheLayout:
    """Return the layout of a spec's cache: FP8_DS_MLA for latents in float8_e4m3fn, LATENT for others, else PLAIN."""
    if spec.kind is not AttentionKind.MLA:
        return PLAIN
    return FP8_DS_MLA if spec.cache_dtype is torch.float8_e4m3fn else LATENT
