"""Recurrent layers of `transformers` whose recurrence is served.

Legend: T flat tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attn_backends import StateInputs, get_state
from builders import BatchBuffers, RequestTables, StateSpec
from spec_decode.models.checkpoints.files import CheckpointError, is_finite
from spec_decode.models.hf.attention import UnservedModel, server
from spec_decode.models.hf.state_kinds import STATE_KINDS, LayerConstants, StateKind

STATE_LAYER_TYPES = ("linear_attention", "conv")
"""The layer types of wrapped layers in a config."""
_PROBE_TOKENS = 70
"""More than a block of the library's prompts, 64."""


def unknown_layer(types: object) -> str:
    """Return the first of a config's layer types that the library does not know, with its layer; empty if none is."""
    from transformers import configuration_utils

    known: Any = getattr(configuration_utils, "ALLOWED_LAYER_TYPES", types)
    unknown = (pair for pair in enumerate(types if isinstance(types, list) else ()) if pair[1] not in known)
    return next((f"layer {layer} in layer_types is of an unknown type, {kind!r:.80}" for layer, kind in unknown), "")


def state_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Return the layers of a model that can be served, by layer index."""
    found: list[Any] = [module for module in model.modules() if type(module).__name__ in STATE_KINDS]
    return {module.layer_idx: module for module in found}


def wrap(layers: dict[int, nn.Module], hidden_size: int) -> None:
    """Let these layers be served instead of keeping states themselves.

    Raises UnservedModel for a layer whose own forward computes something else than the recurrence that would be served.
    """
    for index, layer in layers.items():
        kind = STATE_KINDS[type(layer).__name__]
        try:
            spec, constants = kind.spec(layer), kind.constants(layer)
            forward = partial(_forward, layer, kind, constants)
            problem = _difference(layer, forward, spec, hidden_size)
        except CheckpointError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:  # in another release
            problem = f"{type(error).__name__}: {error}"
        if problem:
            raise UnservedModel(
                f"layer {index} ({type(layer).__name__}) of the installed transformers does not compute the recurrence "
                f"that this library serves in its place: {problem}. Use another version of transformers."
            )
        layer.forward = partial(forward, partial(_served, index, spec))


def _served(index: int, spec: StateSpec, inputs: StateInputs) -> Tensor:
    return server().recur(index, inputs, spec)


def _forward(
    layer: Any,
    kind: StateKind,
    constants: LayerConstants,
    recur: Callable[[StateInputs], Tensor],
    hidden_states: Tensor,
    **_: Any,
) -> Tensor:
    """The layer's forward over one row [1, T, H]. Its cache and masks are not used, see `target`."""
    x, decay, beta, gate = kind.project(layer, hidden_states)
    out = recur(StateInputs(x.contiguous(), decay, beta.float(), *constants))
    return kind.finish(layer, out, gate)[None]


@torch.no_grad()
def _difference(layer: Any, forward: Callable[..., Tensor], spec: StateSpec, hidden_size: int) -> str:
    """Return how the layer's own forward differs, over a text from its beginning; empty if it does not."""
    backend, device, n = get_state("torch_state"), next(layer.parameters()).device, _PROBE_TOKENS
    shape, generator = (1, n, hidden_size), torch.Generator().manual_seed(layer.layer_idx)
    hidden = torch.randn(shape, generator=generator).to(device, spec.dtype)
    [cache] = backend.allocate_state(spec, 1, 1, device)
    tables = RequestTables(page_sizes=[n], num_pages=[1], max_reqs=1, max_seq_len=n, device=device)
    tables.load([[[0]]], [n])
    batch = BatchBuffers(tables, max_tokens=n)
    batch.load([n], [n])
    builder = backend.builder(spec, device, max_reqs=1, max_tokens=n, max_seq_len=n)
    metadata = builder.build(batch.view(0, num_reqs=1, num_tokens=n, max_query_len=n), absorb=True)
    own = type(layer).forward(layer, hidden)  # its own: another target may have wrapped it
    if not is_finite(own):
        raise CheckpointError(
            f"layer {layer.layer_idx} ({type(layer).__name__}) must give finite outputs for a random text, got NaN or "
            "infinity from its own code in transformers: its weights, A_log and dt_bias first, are too large. Restore "
            "them."
        )
    found = forward(lambda inputs: backend.forward(inputs, cache, metadata, spec=spec), hidden)
    return difference(found, own)


def difference(found: Tensor, own: Tensor) -> str:
    """Return how outputs differ from a layer's own; empty for the rounding of another order of sums."""
    allowed = (1e-3 if own.dtype is torch.float32 else 0.05) * own.abs().max()
    error = (found - own).abs().max()
    return "" if bool(error <= allowed) else f"its outputs differ by up to {error:.3g} of {own.abs().max():.3g}"
