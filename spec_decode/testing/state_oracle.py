"""The test oracle of recurrent state: a request's tokens one after the other, without slots, journals or batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from builders import Recurrence, StateSpec


class LayerWeights(NamedTuple):
    """A layer's weights on the CPU, as in `StateInputs`."""

    weight: Tensor
    bias: Tensor | None
    skip: Tensor | None


class Tokens(NamedTuple):
    """Inputs of n tokens in every layer, on the CPU; dims as in `StateInputs`, after [layers, n]."""

    x: Tensor
    decay: Tensor
    beta: Tensor

    @property
    def num(self) -> int:
        return self.x.shape[1]


class SequentialState:
    """One request's state in one layer.

    In float64 it is the reference. In a lower precision, what the convolution gives and the outputs are rounded to it,
    the state to the spec's, and the sums are fp32: its error is what a correct kernel of that precision can have.
    """

    def __init__(self, spec: StateSpec, weights: LayerWeights, dtype: torch.dtype) -> None:
        self.spec, self.weights, self.dtype = spec, weights, dtype
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.state = torch.zeros(spec.matrices, spec.key_dim, spec.value_dim, dtype=self.wide)
        empty = torch.zeros(spec.conv_channels, dtype=self.wide)
        self.window = deque([empty] * (spec.conv_width - 1), maxlen=spec.conv_width - 1)

    def after(self, x: Tensor, decay: Tensor, beta: Tensor) -> tuple[SequentialState, Tensor]:
        """Return the state after one more token, and the token's output [num_value_heads, value_dim]."""
        spec, new = self.spec, SequentialState(self.spec, self.weights, self.dtype)
        x, decay, beta, weight = (part.to(self.wide) for part in (x, decay, beta, self.weights.weight))
        inputs = [*self.window, x]
        new.window.extend(inputs)
        mixed = torch.stack([part * weight[:, column] for column, part in enumerate(inputs)]).sum(0)
        if self.weights.bias is not None:
            mixed = mixed + self.weights.bias.to(self.wide)
        if spec.recurrence is not Recurrence.CONV:
            mixed = mixed * torch.sigmoid(mixed)
        mixed = mixed.to(self.dtype).to(self.wide)
        keys = spec.num_key_heads * spec.key_dim
        value = mixed[2 * keys :].view(-1, spec.value_dim)
        if spec.recurrence is Recurrence.CONV:
            return new, value.to(self.dtype)
        of_key = torch.arange(spec.num_value_heads) // spec.group_size
        query, key = (mixed[at : at + keys].view(-1, spec.key_dim)[of_key] for at in (0, keys))
        kept = torch.einsum("hk,hkv->hkv", decay.exp().view(spec.num_value_heads, -1).expand_as(key), self.state)
        if spec.recurrence is Recurrence.SSD:
            new.state = kept + torch.einsum("h,hk,hv->hkv", beta, key, value)
            output = torch.einsum("hkv,hk->hv", new.state, query)
        else:
            query, key = self._unit(query) / spec.key_dim**0.5, self._unit(key)
            error = value - torch.einsum("hkv,hk->hv", kept, key)
            new.state = kept + torch.einsum("h,hk,hv->hkv", beta, key, error)
            output = torch.einsum("hkv,hk->hv", new.state, query)
        if self.weights.skip is not None:
            output = output + self.weights.skip.to(self.wide)[:, None] * value
        if self.dtype != torch.float64:
            new.state = new.state.to(spec.state_dtype).to(self.wide)
        return new, output.to(self.dtype)

    @staticmethod
    def _unit(vectors: Tensor) -> Tensor:
        return vectors / ((vectors**2).sum(-1, keepdim=True) + 1e-6).sqrt()

    def windows(self) -> Tensor:
        """Return the last inputs of the convolution, [W - 1, channels]."""
        empty = torch.zeros(0, self.spec.conv_channels, dtype=self.wide)
        return torch.stack([*self.window]) if self.window else empty


class Text(NamedTuple):
    """A request so far: its length, and per layer the reference's state and the low-precision one's."""

    length: int
    layers: Sequence[tuple[SequentialState, SequentialState]]

    @classmethod
    def empty(cls, spec: StateSpec, weights: Sequence[LayerWeights]) -> Text:
        """Begin a request."""
        dtypes = (torch.float64, spec.dtype)
        layers = [[SequentialState(spec, own, dtype) for dtype in dtypes] for own in weights]
        return cls(0, [(reference, low) for reference, low in layers])

    def after(self, tokens: Tokens, at: int) -> tuple[Text, tuple[Tensor, Tensor]]:
        """Return the request after token `at` of these, and its outputs [layers, num_value_heads, value_dim] in both
        precisions."""
        made = [
            tuple(state.after(*(part[layer, at] for part in tokens)) for state in pair)
            for layer, pair in enumerate(self.layers)
        ]
        outputs = (torch.stack([pair[kind][1] for pair in made]) for kind in (0, 1))
        text = Text(self.length + 1, [(reference[0], low[0]) for reference, low in made])
        return text, (next(outputs), next(outputs))
