"""The backend of a builder of recurrent states' metadata, from vLLM's backend and stand-ins for its kernels."""

from __future__ import annotations

from typing import Any

from attn_backends import AttentionBackend
from engine_kits.state_checks import Play, recurrent_backend
from engine_kits.state_traffic import DRAFTS, Traffic
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


def recurrent_backend_over(
    engine_backend: Any, recurrence: str, kernels: Kernels, module: str, *, stateless: bool = False
) -> type[AttentionBackend]:
    """Return the backend under test over vLLM's. kernels, stateless: as in HybridRunner; the others as in
    `recurrent_backend`."""
    engine_builder = engine_backend.get_builder_cls()
    return recurrent_backend(
        engine_builder.__name__,
        module,
        recurrence,
        _PLAYS,
        lambda graphs: HybridRunner(engine_backend, kernels, graphs, stateless=stateless),
        GRAPH_SUPPORT[engine_builder._cudagraph_support.name],
        "it does not say supports_draft_decode_metadata_update",
    )
