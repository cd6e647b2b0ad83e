"""The contract of an attention backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from attn_backends.capabilities import Accepted, Capabilities, Rejected
from attn_backends.kv_cache import KVCache, cache_layout
from builders import CONTRACT_VERSION, AttentionSpec, BatchError, MetadataBuilder
from builders.errors import require_tensor, require_vector

Sinks: TypeAlias = Tensor | None
"""One extra logit per query head without a key, fp32 [num_q_heads], or None. A sink of -inf has no effect; one of +inf
leaves the tokens no weight, so the head's output is 0."""


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
        """Allocate an uninitialised cache in the spec's layout, with the strides that suit this backend best. Its owner
        adds the scales of an 8-bit cache."""
        return cache_layout(spec).allocate(spec, num_pages, device)

    def write_kv(self, key: Tensor, value: Tensor, cache: KVCache, metadata: Any) -> None:
        """Store new keys and values at metadata.slot_mapping, both in spec.new_kv_dtype.

        A slot outside the cache, such as -1, writes nothing.

        key    [num_tokens, num_kv_heads, head_dim]; if the cache holds one latent per token, the key is the latent
        value  [num_tokens, num_kv_heads, value_dim]

        Raises BatchError, and writes nothing, for tensors of another shape, dtype or device.
        """
        cache.layout.write(key, value, cache, metadata.slot_mapping)

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
    cache.layout.check_new(key, value, cache, slots)


def check_forward_inputs(query: Tensor, cache: KVCache, metadata: Any, spec: AttentionSpec, sinks: Sinks) -> None:
    """Raise BatchError for tensors that a kernel would misread. It never syncs with the device."""
    device, shape = query.device, (metadata.num_tokens, spec.num_q_heads, spec.head_dim)
    require_tensor("query", query, shape=shape, dtype=spec.dtype, device=device)
    cache_layout(spec).check(cache, spec, device)
    if (sinks is not None) != spec.sinks:
        raise BatchError(
            f"sinks must be passed exactly if the spec has them, got spec.sinks={spec.sinks} and "
            f"{'a tensor' if sinks is not None else 'None'}; the softmax would be wrong. Pass them "
            "for such a spec only."
        )
    if sinks is not None:
        require_vector("sinks", sinks, length=spec.num_q_heads, dtype=torch.float32, device=device)
