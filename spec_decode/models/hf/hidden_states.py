"""Capture the residual states between the layers of a `transformers` model. State i enters layer i; for n layers, state
n is the output of the last one, before the final norm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

_CAPTURED: ContextVar[dict[int, torch.Tensor]] = ContextVar("captured")


@contextmanager
def capturing() -> Iterator[dict[int, torch.Tensor]]:
    """In this context and thread, a forward fills the dict with the states [1, T, H] that have hooks."""
    token = _CAPTURED.set({})
    try:
        yield _CAPTURED.get()
    finally:
        _CAPTURED.reset(token)


def set_hooks(decoder: nn.Module, num_layers: int, states: Sequence[int]) -> None:
    """Let `capturing` collect these states, 0 to num_layers. Raises ValueError if the layers cannot be identified."""
    layers = _layers(decoder, num_layers)
    for state in set(states):
        if state == 0:
            layers[0].register_forward_pre_hook(_capture_input, with_kwargs=True)
        else:
            layers[state - 1].register_forward_hook(lambda _, __, out, state=state: _capture_output(state, out))


def _capture_input(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if (captured := _CAPTURED.get(None)) is not None:
        captured[0] = args[0] if args else kwargs["hidden_states"]


def _capture_output(state: int, out: Any) -> None:
    if (captured := _CAPTURED.get(None)) is not None:
        captured[state] = out[0] if isinstance(out, tuple) else out


def _layers(decoder: nn.Module, num_layers: int) -> nn.ModuleList:
    lists = [m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers and _in_order(m)]
    if not lists:
        raise ValueError(
            f"{type(decoder).__name__} has no list of its {num_layers} layers with attention; the states between them "
            "cannot be captured. Use a draft that reads the last states."
        )
    return lists[0]


def _in_order(layers: nn.ModuleList) -> bool:
    numbers = [{getattr(m, "layer_idx", None) for m in layer.modules()} - {None} for layer in layers]
    return all(number == {index} for index, number in enumerate(numbers))
