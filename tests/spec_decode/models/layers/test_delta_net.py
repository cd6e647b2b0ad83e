"""The recurrent layer of Qwen3-Next and Qwen3.5. Other tests compare it with that of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_backends import StateInputs
from attn_backends.kernels.rope import Rope
from builders import StateSpec
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.store import RandomStore, ScopedWeights
from spec_decode.models.layers.delta_net import DeltaNet, read_state_spec
from tests.factories import CPU

HIDDEN = 16
FIELDS = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 3,
}  # fmt: skip
ROPE: Any = Rope(torch.zeros(5, dtype=torch.int64), torch.zeros(1, 2))


class Recorded:
    """States of which each output is the token's value."""

    inputs: StateInputs

    def recur(self, layer: int, inputs: StateInputs) -> torch.Tensor:
        assert layer == 7
        self.inputs = inputs
        return inputs.x[:, -24:].reshape(-1, 4, 6)


def read(**changes: Any) -> StateSpec:
    return read_state_spec(ConfigReader({**FIELDS, **changes}, "config.json"))


@pytest.fixture
def layer() -> DeltaNet:
    names = [f"in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")]
    names += ["conv1d.weight", "A_log", "dt_bias", "norm.weight", "out_proj.weight"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = ScopedWeights(RandomStore({}, names, CPU), "", torch.float32, CPU)
        return DeltaNet(read(), HIDDEN, 1e-6, weights, by_head=False)


def test_only_kept_rows_are_normed_and_projected(layer: DeltaNet) -> None:
    x, states = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1)), Recorded()
    rows = torch.tensor([4, 1])
    whole = layer(x, ROPE, 7, states)
    assert torch.allclose(layer(x, ROPE, 7, states, lambda each: each[rows]), whole[rows], atol=1e-7)
    assert states.inputs.x.shape == (5, 2 * 16 + 24) and states.inputs.decay.shape == (5, 4), "all tokens are taken in"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"linear_num_value_heads": 3}, "num_value_heads must be a multiple of num_key_heads, got 3 and 2"),
        ({"linear_key_head_dim": 0}, "key_dim must be at least 1, got 0"),
        ({"linear_conv_kernel_dim": None}, "config.json lacks linear_conv_kernel_dim, an integer"),
    ],
)
def test_impossible_states_are_an_error_of_the_config(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        read(**changes)
