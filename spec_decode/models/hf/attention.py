"""An attention function for `transformers` that delegates every layer's attention to the caller of the model, and its
recurrence if it has one.

Legend: T flat tokens, D head dim, E value dim; the library's own layout is [1, heads, T, dim].
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import nn

from attn_backends import StateInputs
from builders import AttentionSpec, StateSpec
from spec_decode.model_api import AttentionInputs
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.hf import absent

try:
    from transformers import AttentionInterface
except ImportError as error:
    raise ImportError(absent(error)) from error

ATTENTION_NAME = "attn_backends_paged"
"""The function's registered name. The library creates no masks for an attention without a mask function."""

_IGNORED_ARGUMENTS = frozenset(
    {
        "cache_position",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Arguments that models pass on to their attention but that do not change it."""


class UnservedModel(CheckpointError):
    """A model whose attention or logits this library cannot compute; the message names the layer and the reason."""


class Serve(Protocol):
    """Computes what mixes the tokens of a layer. A spec is the one that the layer requests, with pages of one token, or
    a journal of one."""

    def attend(self, inputs: AttentionInputs, spec: AttentionSpec) -> torch.Tensor:
        """Return attention [T, Hq, E] of inputs: query [T, Hq, D], key [T, Hkv, D] and value [T, Hkv, E], already
        rotated, and sinks."""
        ...

    def recur(self, layer: int, inputs: StateInputs, spec: StateSpec) -> torch.Tensor:
        """Return the outputs [T, num_value_heads, value_dim] of a recurrent layer."""
        ...


_SERVE: ContextVar[Serve] = ContextVar("serve")


@contextmanager
def serving(serve: Serve) -> Iterator[None]:
    """In this context and thread, let `serve` compute the attention of models that use ATTENTION_NAME, and the
    recurrence of wrapped layers."""
    token = _SERVE.set(serve)
    try:
        yield
    finally:
        _SERVE.reset(token)


def server() -> Serve:
    """Return who serves in this context and thread. Raises UnservedModel for a model that was called directly."""
    if (serve := _SERVE.get(None)) is None:
        raise UnservedModel(
            "this model belongs to a TransformersTarget, which computes its attention, and was called directly. Call "
            "the target, or load the model again for other uses."
        )
    return serve


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The function that the library calls for each layer; returns [1, T, Hq, E] and no attention weights."""
    serve = server()
    window, soft_cap, sinks = (others.pop(name, None) for name in ("sliding_window", "softcap", "s_aux"))
    _refuse_unsupported_attention(module, query, attention_mask, scaling, dropout, others)
    assert scaling is not None
    spec = AttentionSpec(
        num_q_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        page_size=1,
        dtype=query.dtype,
        scale=float(scaling),
        sliding_window=window,
        soft_cap=soft_cap,
        sinks=sinks is not None,
    )
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    layer: Any = module.layer_idx
    sinks = None if sinks is None else sinks.float()
    return serve.attend(AttentionInputs(layer, query, key, value, sinks=sinks), spec)[None], None


def _refuse_unsupported_attention(
    module: nn.Module,
    query: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    others: dict[str, Any],
) -> None:
    problems = []
    if not isinstance(getattr(module, "layer_idx", None), int):
        problems.append(f"has no integer layer_idx, got {getattr(module, 'layer_idx', None)!r}")
    if query.shape[0] != 1:
        problems.append(f"splits the tokens into {query.shape[0]} rows")
    if attention_mask is not None:
        problems.append("adds its own mask or bias to the scores")
    if not isinstance(scaling, float | int):
        problems.append(f"has no number as scaling, got {scaling!r}")
    if dropout:
        problems.append(f"uses dropout ({dropout:g})")
    if not (getattr(module, "is_causal", True) and others.pop("is_causal", None) in (None, True)):
        problems.append("attends to later tokens")
    if getattr(module, "is_kv_shared_layer", False):
        problems.append("reads keys and values of another layer")
    ignored = _IGNORED_ARGUMENTS
    problems += [f"requests {name}" for name in sorted(others) if others[name] is not None and name not in ignored]
    if problems:
        raise unserved(f"layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__}) {'; it '.join(problems)}")


def unserved(reason: str) -> UnservedModel:
    """Return the error for an unsupported model; `reason` says which part of it does what."""
    return UnservedModel(
        "a target's layers must use causal softmax attention over their own keys and values, or a recurrence that is "
        f"served, and mix tokens in no other way: {reason}. Use another model."
    )


AttentionInterface.register(ATTENTION_NAME, _attention)
