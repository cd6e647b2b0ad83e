"""The backend of a builder of recurrent states' metadata, from vLLM's backend and stand-ins for its kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from attn_backends import AttentionBackend
from builders import AdvanceLevel, AdvanceSupport, AttentionBatch, AttentionSpec, MetadataBuilder
from engine_kits.state_checks import Play, StateBackend
from engine_kits.state_traffic import DRAFTS, Traffic
from engine_kits.subjects import HEADS, backend_class
from engine_kits.vllm.hybrid_runner import HybridRunner, Kernels
from engine_kits.vllm.making import GRAPH_SUPPORT

_SHAPED = (1 + DRAFTS,)
"""Tokens of a prompt's chunk that has the shape of a verification."""
_TRAFFIC = {
    "verify": Traffic(),
    "fewer_drafts": Traffic(drafts=(0, 1, 2, DRAFTS, DRAFTS)),
    "no_drafts": Traffic(idle=0.4, drafts=(0, DRAFTS)),
    "chunks": Traffic(chunks=(1, 3, *_SHAPED)),
    "elsewhere": Traffic(elsewhere=0.7, idle=0.2),
    "mixed": Traffic(chunks=(1, 3), drafts=(0, 2, DRAFTS, DRAFTS), idle=0.2, elsewhere=0.3),
    "shaped_prompts": Traffic(_SHAPED, alone=True),
    "shaped_prompts_beside_no_drafts": Traffic((1, *_SHAPED, 20), _SHAPED, (0, DRAFTS), idle=0.5),
}
_PLAYS = {
    "mixed-eager": Play(_TRAFFIC["mixed"]),
    **{f"{name}-v2_graph": Play(traffic, "v2") for name, traffic in _TRAFFIC.items()},
    "verify-v1_graph": Play(_TRAFFIC["verify"], "v1"),
    "shaped_prompts-v1_graph": Play(_TRAFFIC["shaped_prompts"], "v1"),
}
"""By the rule on graphs: none, the V2 runner's, the V1 runner's."""


class RecurrentStates(MetadataBuilder[Any]):
    """The claims of vLLM's builder. A runner of the kit calls it, with batches of vLLM's."""

    step_fields = ()

    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(AdvanceLevel.REBUILD, "it does not say supports_draft_decode_metadata_update")

    def allocate(self) -> None: ...

    def build(self, batch: AttentionBatch, *, horizon: int = 0) -> Any:
        """Raise NotImplementedError: a batch of attention's says nothing of states."""
        raise NotImplementedError("metadata of states is built for an engine's batch")


def state_backend(
    engine_backend: Any, recurrence: str, kernels: Kernels, module: str, *, stateless: bool = False
) -> type[AttentionBackend]:
    """Return the backend under test over vLLM's. recurrence: its column. stateless, module: as in HybridRunner and
    `backend_class`."""
    engine_builder = engine_backend.get_builder_cls()
    claims = {"graph_support": GRAPH_SUPPORT[engine_builder._cudagraph_support.name]}
    return backend_class(
        module,
        type(engine_builder.__name__, (RecurrentStates,), claims),
        HEADS,
        StateBackend,
        recurrence=recurrence,
        plays=_PLAYS,
        engine=staticmethod(partial(HybridRunner, engine_backend, kernels, stateless=stateless)),
    )
