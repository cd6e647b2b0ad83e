"""The parts of a published EAGLE-3 around its layers: the fusion of the target's states, and the draft's own head.

Legend: T tokens, F target_states_size, H hidden size. Floats are in the weights' dtype.
"""

from __future__ import annotations

import torch
from torch import nn

from spec_decode.model_api import DraftModel, TargetModel
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.store import TensorStore
from spec_decode.models.draft import check_shared, is_by_speculators, read_layers
from spec_decode.models.draft_vocabulary import HEAD
from spec_decode.models.layers.linear import Linear, NormLinear, joined
from spec_decode.models.layers.rms_norm import RMSNorm
from spec_decode.models.target_head import TargetHead


class AuxStates(nn.Module):
    """Fuses the concatenated states of target layers into one, after a norm over all, a norm for each, or none."""

    def __init__(self, store: TensorStore, sizes: tuple[int, int], hidden: int, eps: float) -> None:
        """sizes: dims of all layers' states together, and of one layer's."""
        super().__init__()
        total, per_layer = sizes
        self.input_norm = RMSNorm(total, eps) if _flag(store, "norm_before_fc") else None
        count = total // per_layer if _flag(store, "fc_norm") else 0
        self.fc_norm = nn.ModuleList(RMSNorm(per_layer, eps) for _ in range(count))
        self.fc = Linear(total, hidden)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Map states [T, F] to [T, H]."""
        if self.input_norm is not None:
            states = self.input_norm(states)[1]
        if self.fc_norm:
            parts = states.chunk(len(self.fc_norm), -1)
            states = torch.cat([norm(part)[1] for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc.product(states)


class DraftHead(nn.Module):
    """The final norm, and the projection to the draft's vocabulary: the target's, if the checkpoint has none."""

    def __init__(self, store: TensorStore, target: TargetModel, hidden: int, eps: float, scored: int) -> None:
        """scored: the tokens of the draft's vocabulary. Raises CheckpointError if the draft would use the head of a
        target of another width."""
        super().__init__()
        self.norm = RMSNorm(hidden, eps)
        self.lm_head: NormLinear | TargetHead = TargetHead(target)
        if HEAD in store.names():
            self.lm_head = NormLinear(hidden, scored)
        else:
            check_shared(f"{store.folder}, without a head,", "hidden_size", hidden, target.hidden_size)
        self.norm_output = _flag(store, "norm_output")
        """Whether the next step reads the state after the norm (EAGLE-3.1), instead of the one before it."""

    def next_states(self, x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        """Return the states [T, H] that the next step reads, from the ResidualStream after the last layer."""
        if not self.norm_output:
            return joined(x, delta)
        normed: torch.Tensor = self.norm(x, delta)[1]
        return normed

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits [T, draft vocabulary] for states [T, H] from `next_states`."""
        if self.norm_output:
            return self.lm_head.product(states)
        if isinstance(self.lm_head, TargetHead):
            return self.lm_head.product(self.norm(states)[1])
        logits: torch.Tensor = self.lm_head(states, None, self.norm)[1]
        return logits


class Eagle3Ends(DraftModel):
    """A draft with both parts around its layers."""

    aux: AuxStates
    head: DraftHead

    def combine(self, target_hidden_states: torch.Tensor) -> torch.Tensor:
        """Map target_hidden_states [T, F], of the target's hidden size for each layer, to states [T, H]."""
        states: torch.Tensor = self.aux(target_hidden_states)
        return states

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [T, draft vocabulary] for hidden [T, H]."""
        logits: torch.Tensor = self.head(hidden)
        return logits


def published_name(name: str) -> str:
    """Return the checkpoint's name of a parameter: checkpoints do not nest the parts."""
    return name.removeprefix("aux.").removeprefix("head.")


def first_prefix(store: TensorStore) -> str:
    """Return the prefix of the first layer's tensors; the authors call the layer midlayer."""
    return "midlayer." if any(name.startswith("midlayer.") for name in store.names()) else "layers.0."


def aux_hidden_state_layers(store: TensorStore, num_target_layers: int) -> tuple[int, ...]:
    """Return the target's states that the draft reads, as the layers they enter, 0 to n; n is the last layer's output.

    Checkpoints follow two conventions under one name, eagle_aux_hidden_state_layer_ids. SGLang and NVIDIA's trainer
    list layers whose *output* is read: their lists begin with 1, and the output of layer i enters layer i + 1. Others,
    including vLLM, list the layers that the states enter, and begin with 2; these and all other lists are used as they
    are. `speculators` always lists the layers that the states enter; speculators_model_type identifies its files.
    Without a list, the default is that of EAGLE-3's own training: 2, n // 2 and n - 3.

    Raises CheckpointError for states that the target does not have.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    section = _section(store, name)
    default = [2, num_target_layers // 2, num_target_layers - 3]
    by_output = section.get(name, list, default)[:1] == [1] and not is_by_speculators(store)
    return read_layers(section, name, num_target_layers, by_output=by_output, default=default)


def _flag(store: TensorStore, name: str) -> bool:
    return _section(store, name).get(name, bool, False)


def _section(store: TensorStore, name: str) -> ConfigReader:
    """Return the section of config.json that has a field: the top level, or NVIDIA's eagle_config."""
    return store.config if store.config.values.get(name) else store.config.section("eagle_config")
