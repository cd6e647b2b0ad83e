"""The contract of an attention backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from attn_backends.capabilities import Accepted, Capabilities, Rejected
from attn_backends.kernels.fp8_ds_mla import LATENT, TOKEN_BYTES, page_bytes
from attn_backends.kernels.write_kv import check_new_kv, write_kv
from attn_backends.kernels.write_latent import write_latent
from builders import CONTRACT_VERSION, AttentionKind, AttentionSpec, BatchError, MetadataBuilder
from builders.errors import require, require_tensor, require_vector

Sinks: TypeAlias = Tensor | None
"""One extra logit per query head without a key, fp32 [num_q_heads], or None. A sink of -inf has no effect; one of +inf
leaves the tokens no weight, so the head's output is 0."""


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys [num_pages, page_size, num_kv_heads, head_dim] and values [..., value_dim]: views with any strides whose
    last dim is contiguous. The allocator decides the layout; an adapter never copies them.

    If keys and values are one latent, the values are a view of the keys. An fp8_ds_mla cache holds bytes, uint8
    [num_pages, page_size, 1, bytes per token], in both, with a page's bytes adjacent; there can be gaps between pages.
    """

    key: Tensor
    value: Tensor

    @property
    def num_pages(self) -> int:
        return self.key.shape[0]

    @property
    def latent(self) -> bool:
        """Whether the values are a view of the keys."""
        return self.key.data_ptr() == self.value.data_ptr()

    @property
    def latents(self) -> Tensor:
        """The latents [num_pages, page_size, head_dim]; for fp8_ds_mla each page's bytes [num_pages, page_bytes]."""
        if self.key.dtype is torch.uint8:
            stride = self.key.stride(0)
            return self.key.as_strided((self.num_pages, min(stride, page_bytes(self.key.shape[1]))), (stride, 1))
        return self.key[:, :, 0]


class AttentionBackend(ABC):
    """One family of attention kernels behind one contract. Stateless: everything per batch lives in the metadata."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    builder: ClassVar[type[MetadataBuilder[Any]]]
    contract_version: ClassVar[tuple[int, int]] = CONTRACT_VERSION
    """The contract (major, minor) that the backend was written for. Its own class must state it, as a literal. Checks
    added in later versions are only previews for it."""
    version: ClassVar[str] = "0"
    """Version of the kernels, for provenance."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Drop the fused writes of a subclass that overrides `write_kv`, unless it states its capabilities again."""
        super().__init_subclass__(**kwargs)
        if "write_kv" in cls.__dict__ and "capabilities" not in cls.__dict__ and hasattr(cls, "capabilities"):
            cls.capabilities = replace(cls.capabilities, fused_writes=frozenset())

    def supports(self, spec: AttentionSpec, device: torch.device) -> Accepted | Rejected:
        """Return whether the spec runs on the device: Accepted, or Rejected with every reason."""
        reasons = self.capabilities.unsupported_reasons(spec, device) + self.unsupported_reasons(spec, device)
        return Rejected(tuple(reasons)) if reasons else Accepted()

    def unsupported_reasons(self, spec: AttentionSpec, device: torch.device) -> list[str]:
        """Return the reasons that the capability record cannot express."""
        return []

    def compiled_for(self, spec: AttentionSpec) -> Hashable:
        """Return what the kernels of this spec are compiled for at their first use, if that takes tens of seconds;
        None if it is quick. Equal for specs that share kernels: the conformance kit draws few cases that need new ones.
        """
        return None

    def allocate_kv(self, spec: AttentionSpec, num_pages: int, device: torch.device) -> KVCache:
        """Allocate an uninitialised cache in the layout that suits this backend best."""
        if spec.fp8_ds_mla:
            size = page_bytes(spec.page_size)
            pages = torch.empty(num_pages, size, dtype=torch.uint8, device=device)
            tokens = (num_pages, spec.page_size, 1, TOKEN_BYTES)
            latents = pages.as_strided(tokens, (size, TOKEN_BYTES, TOKEN_BYTES, 1))
            return KVCache(latents, latents)
        shape = (num_pages, spec.page_size, spec.num_kv_heads)
        key = torch.empty(*shape, spec.head_dim, dtype=spec.cache_dtype, device=device)
        if spec.kind is AttentionKind.MLA:
            return KVCache(key, key[..., : spec.out_dim])
        return KVCache(key, torch.empty(*shape, spec.out_dim, dtype=spec.cache_dtype, device=device))

    def write_kv(self, key: Tensor, value: Tensor, cache: KVCache, metadata: Any) -> None:
        """Store new keys and values at metadata.slot_mapping, both in spec.new_kv_dtype.

        A slot outside the cache, such as -1, writes nothing.

        key    [num_tokens, num_kv_heads, head_dim]; if the cache holds one latent per token, the key is the latent
        value  [num_tokens, num_kv_heads, value_dim]

        Raises BatchError, and writes nothing, for tensors of another shape, dtype or device.
        """
        if cache.latent:
            require(
                key.dim() == 3 and key.shape[1] == 1,
                f"a latent cache takes one per token, got keys {list(key.shape)}; the others would be lost. Pass keys "
                "[num_tokens, 1, head_dim].",
            )
            write_latent(key[:, 0], cache.latents, metadata.slot_mapping, page_size=cache.key.shape[1])
        else:
            write_kv(key, value, cache.key, cache.value, metadata.slot_mapping)

    @abstractmethod
    def forward(
        self, query: Tensor, cache: KVCache, metadata: Any, *, spec: AttentionSpec, sinks: Sinks = None
    ) -> Tensor:
        """Compute attention of query [num_tokens, num_q_heads, head_dim] over the cache.

        Returns [num_tokens, num_q_heads, value_dim] in the query's dtype.
        The KV of the query tokens is already written. Rows whose seq_len is 0 give 0, even with sinks.
        sinks: fp32 [num_q_heads] if spec.sinks, else None.
        """


def check_write_inputs(key: Tensor, value: Tensor, cache: KVCache, metadata: Any) -> None:
    """Raise BatchError for tensors that a `write_kv` kernel would misread. It never syncs with the device."""
    slots, device = metadata.slot_mapping, cache.key.device
    require_vector("slot_mapping", slots, length=metadata.num_tokens, dtype=torch.int64, device=device)
    if not cache.latent:
        check_new_kv(key, value, cache.key, cache.value, slots)
        return
    packed = cache.key.dtype is torch.uint8
    dim, dtype = (LATENT, torch.bfloat16) if packed else (cache.key.shape[-1], cache.key.dtype)
    require_tensor("key", key, shape=(metadata.num_tokens, 1, dim), dtype=dtype, device=device)


def check_forward_inputs(query: Tensor, cache: KVCache, metadata: Any, spec: AttentionSpec, sinks: Sinks) -> None:
    """Raise BatchError for tensors that a kernel would misread. It never syncs with the device."""
    device, shape = query.device, (metadata.num_tokens, spec.num_q_heads, spec.head_dim)
    require_tensor("query", query, shape=shape, dtype=spec.dtype, device=device)
    dims, dtype = (spec.head_dim, spec.out_dim), spec.cache_dtype
    if spec.fp8_ds_mla:
        dims, dtype = (TOKEN_BYTES, TOKEN_BYTES), torch.uint8
    for name, tensor, dim in (("key cache", cache.key, dims[0]), ("value cache", cache.value, dims[1])):
        pages = (None, spec.page_size, spec.num_kv_heads, dim)
        require_tensor(name, tensor, shape=pages, dtype=dtype, device=device)
        if tensor.stride(-1) != 1:
            raise BatchError(
                f"the last dim of the {name} must be contiguous, got strides {tuple(tensor.stride())}; a kernel would "
                "read the wrong elements. Keep the head dim innermost."
            )
    if (sinks is not None) != spec.sinks:
        raise BatchError(
            f"sinks must be passed exactly if the spec has them, got spec.sinks={spec.sinks} and "
            f"{'a tensor' if sinks is not None else 'None'}; the softmax would be wrong. Set both or neither."
        )
    if sinks is not None:
        require_vector("sinks", sinks, length=spec.num_q_heads, dtype=torch.float32, device=device)
