"""The contract of an attention backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from attn_backends.capabilities import Accepted, Capabilities, Rejected
from attn_backends.ops.write_kv import write_kv
from builders import CONTRACT_VERSION, AttentionSpec, BatchError, MetadataBuilder
from builders.errors import require_tensor


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys [num_pages, page_size, num_kv_heads, head_dim] and values [..., value_dim]: views with any strides whose
    last dim is contiguous. How they are packed is the allocator's business; an adapter never copies them.
    """

    key: torch.Tensor
    value: torch.Tensor

    @property
    def num_pages(self) -> int:
        return self.key.shape[0]


class AttentionBackend(ABC):
    """One family of attention kernels behind one contract. Stateless: everything per batch lives in the metadata."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    builder: ClassVar[type[MetadataBuilder[Any]]]
    contract_version: ClassVar[tuple[int, int]] = CONTRACT_VERSION
    version: ClassVar[str] = "0"
    """Version of the kernels, for provenance."""

    def supports(self, spec: AttentionSpec, device: torch.device) -> Accepted | Rejected:
        """Whether the spec runs on the device: accepted, or rejected with every reason."""
        reasons = self.capabilities.reasons_against(spec, device) + self.further_reasons(spec, device)
        return Rejected(tuple(reasons)) if reasons else Accepted()

    def further_reasons(self, spec: AttentionSpec, device: torch.device) -> list[str]:
        """Reasons that the capability record cannot express."""
        return []

    def allocate_kv(self, spec: AttentionSpec, num_pages: int, device: torch.device) -> KVCache:
        """An uninitialised cache in the layout this backend likes best."""
        shape = (num_pages, spec.page_size, spec.num_kv_heads)
        return KVCache(
            torch.empty(*shape, spec.head_dim, dtype=spec.cache_dtype, device=device),
            torch.empty(*shape, spec.out_dim, dtype=spec.cache_dtype, device=device),
        )

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, cache: KVCache, metadata: Any) -> None:
        """Store key [num_tokens, num_kv_heads, head_dim] and value [..., value_dim] at metadata.slot_mapping."""
        write_kv(key, value, cache.key, cache.value, metadata.slot_mapping)

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,
        cache: KVCache,
        metadata: Any,
        *,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of query [num_tokens, num_q_heads, head_dim] over the cache; [num_tokens, num_q_heads, value_dim].

        The KV of the query tokens is already written. Rows whose seq_len is 0 come out as 0.
        sinks: fp32 [num_q_heads], given exactly when spec.sinks.
        """


def check_forward_inputs(
    query: torch.Tensor, cache: KVCache, metadata: Any, spec: AttentionSpec, sinks: torch.Tensor | None
) -> None:
    """Refuse tensors that a kernel would read as something else. Host checks of shapes only: no sync."""
    device = query.device
    require_tensor(
        "query",
        query,
        shape=(metadata.num_tokens, spec.num_q_heads, spec.head_dim),
        dtype=spec.dtype,
        device=device,
    )
    for name, tensor, dim in (
        ("key cache", cache.key, spec.head_dim),
        ("value cache", cache.value, spec.out_dim),
    ):
        require_tensor(
            name,
            tensor,
            shape=(None, spec.page_size, spec.num_kv_heads, dim),
            dtype=spec.cache_dtype,
            device=device,
        )
        if tensor.stride(-1) != 1:
            raise BatchError(
                f"the last dim of the {name} must be contiguous, got strides {tuple(tensor.stride())}; a kernel would "
                "read the wrong elements, so nothing was run. Keep the head dim innermost."
            )
    if (sinks is not None) != spec.sinks:
        raise BatchError(
            f"sinks must be given exactly when the spec has them, got spec.sinks={spec.sinks} and "
            f"{'a tensor' if sinks is not None else 'None'}; the softmax would be another one. Pass both or neither."
        )
    if sinks is not None:
        require_tensor("sinks", sinks, shape=(spec.num_q_heads,), dtype=torch.float32, device=device)
