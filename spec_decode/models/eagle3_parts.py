"""What every EAGLE-3 has around its layers, as published: states of the target made one, and a head of its own.

Legend: T tokens, F target_states_size, H hidden size. Floats are in the weights' dtype.
"""

from __future__ import annotations

import torch
from torch import nn

from spec_decode.models.base import DraftModel
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.store import TensorStore
from spec_decode.models.draft import is_by_speculators, read_layers
from spec_decode.models.layers.linear import Linear, NormLinear, joined
from spec_decode.models.layers.rms_norm import RMSNorm


class AuxStates(nn.Module):
    """States of the target's layers, side by side, made one state: normed whole, or each by itself, or not at all."""

    def __init__(self, store: TensorStore, sizes: tuple[int, int], hidden: int, eps: float) -> None:
        """sizes: dims of the states of all layers, and of one."""
        super().__init__()
        whole, each = sizes
        self.input_norm = RMSNorm(whole, eps) if _flag(store, "norm_before_fc") else None
        count = whole // each if _flag(store, "fc_norm") else 0
        self.fc_norm = nn.ModuleList(RMSNorm(each, eps) for _ in range(count))
        self.fc = Linear(whole, hidden)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[T, F]; [T, H]."""
        if self.input_norm is not None:
            states = self.input_norm(states)[1]
        if self.fc_norm:
            parts = states.chunk(len(self.fc_norm), -1)
            states = torch.cat([norm(part)[1] for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc.product(states)


class DraftHead(nn.Module):
    """The last norm, and the projection to the draft's vocabulary."""

    def __init__(self, store: TensorStore, hidden: int, eps: float, vocab_size: int) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = NormLinear(hidden, vocab_size)
        self.norm_output = _flag(store, "norm_output")
        """Whether the normed state is handed on (EAGLE-3.1), not the one before the norm."""

    def handed_on(self, x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        """The state of a step [T, H], of a ResidualStream after the last layer."""
        if not self.norm_output:
            return joined(x, delta)
        normed: torch.Tensor = self.norm(x, delta)[1]
        return normed

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[T, H] as they are handed on; logits [T, draft vocabulary]."""
        if self.norm_output:
            return self.lm_head.product(states)
        logits: torch.Tensor = self.lm_head(states, None, self.norm)[1]
        return logits


class Eagle3Ends(DraftModel):
    """A draft with both parts around its layers."""

    aux: AuxStates
    head: DraftHead

    def combine(self, target_hidden_states: torch.Tensor) -> torch.Tensor:
        """target_hidden_states [T, F], of each layer the target's hidden size; states [T, H]."""
        states: torch.Tensor = self.aux(target_hidden_states)
        return states

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, H]; logits [T, draft vocabulary]."""
        logits: torch.Tensor = self.head(hidden)
        return logits


def published_name(name: str) -> str:
    """What checkpoints call a parameter: they keep those of both parts with the layers."""
    return name.removeprefix("aux.").removeprefix("head.")


def first_prefix(store: TensorStore) -> str:
    """What the tensors of the first layer begin with; its authors call it midlayer."""
    return "midlayer." if any(name.startswith("midlayer.") for name in store.names()) else "layers.0."


def aux_hidden_state_layers(store: TensorStore, num_target_layers: int) -> tuple[int, ...]:
    """The states of the target that the draft reads, by the layers they enter: 0 to n of n, where n leaves the last.

    Checkpoints follow two conventions under one name, eagle_aux_hidden_state_layer_ids. SGLang and NVIDIA's trainer
    count layers whose *output* is read: their lists begin with 1, and layer i's output enters layer i + 1. Others,
    vLLM's among them, name the layers that the states enter, and begin with 2: they are used as they stand, and so is
    any other list. `speculators` names the layers entered whatever its list begins with; a field of its own tells its
    files. Without a list, EAGLE-3's own training: 2, n // 2 and n - 3.

    Raises CheckpointError for states that the target does not have.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    section = _section(store, name)
    default = [2, num_target_layers // 2, num_target_layers - 3]
    left = section.get(name, list, default)[:1] == [1] and not is_by_speculators(store)
    return read_layers(section, name, num_target_layers, left=left, default=default)


def _flag(store: TensorStore, name: str) -> bool:
    return _section(store, name).get(name, bool, False)


def _section(store: TensorStore, name: str) -> ConfigReader:
    """Where config.json says a field: at its top, or in NVIDIA's eagle_config."""
    return store.config if store.config.values.get(name) else store.config.section("eagle_config")
