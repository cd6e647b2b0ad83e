import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from spec_decode.models import CheckpointError
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.decoder_config import read_decoder
from spec_decode.models.layer_windows import no_windows
from spec_decode.models.layers.rope import LLAMA_SCALINGS, Llama3Scaling, RotaryEmbedding, read_rope
from tests.factories import make_config
from tests.spec_decode.models.oracle import llama3

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(**config):
    return read_rope(ConfigReader(config, "config.json"), LLAMA_SCALINGS)


@given(
    factor=st.floats(1, 64),
    low=st.floats(0.5, 4),
    above=st.floats(0.1, 8),
    original=st.integers(64, 65536),
    frequency=st.floats(1e-6, 1),
)
def test_llama3_scaling_matches_published_rule(factor, low, above, original, frequency):
    fields = {"factor": factor, "low_freq_factor": low, "high_freq_factor": low + above}
    scaling = Llama3Scaling(**fields, original_max_position_embeddings=original)
    found = scaling.scaled(torch.tensor([frequency], dtype=torch.float64))
    expected = llama3(frequency, {**fields, "original_max_position_embeddings": original})
    assert float(found) == pytest.approx(expected, rel=1e-9)


def test_linear_scaling_divides_positions():
    config = make_config(max_positions=40)
    scaling = read(rope_scaling={"type": "linear", "factor": 4})[1]
    scaled = RotaryEmbedding(config, scaling).table
    assert torch.allclose(scaled[::4], RotaryEmbedding(config).table[:10], atol=1e-6)


def test_scaled_table_is_not_in_state_dict():
    assert not RotaryEmbedding(make_config(), Llama3Scaling(**LLAMA3)).state_dict()


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 700.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 700, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 700.0, **LLAMA3}},
        {"rope_theta": 700.0, "rope_parameters": {"rope_type": "llama3", **LLAMA3}, "rope_scaling": None},
    ],
)
def test_old_and_new_configs_read_alike(config):
    assert read(**config) == (700.0, Llama3Scaling(**LLAMA3))


@pytest.mark.parametrize("config", [{}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}])
def test_a_config_without_scaling_has_none(config):
    assert read(**config) == (10000.0, None)


L3 = {"rope_type": "llama3", **LLAMA3}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
SCALING = "rope_scaling in config.json"
WRONG = [
    *(
        (
            {"rope_type": kind, "factor": 4.0},
            f"rope_type in {SCALING} must be default, linear, llama3 or yarn, got {kind!r}",
        )
        for kind in ("longrope", "dynamic")
    ),
    *(({name: value for name, value in L3.items() if name != field}, f"lacks {field}, a number") for field in LLAMA3),
    ({"rope_type": "linear", "factor": float("nan")}, f"factor in {SCALING} must be a number between"),
    ({"rope_type": "linear", "factor": 0}, f"factor in {SCALING} must be positive, got"),
    ({"rope_type": "linear", "factor": -2.0}, f"factor in {SCALING} must be positive, got"),
    ({**YARN, "rope_theta": 1.0}, f"{SCALING} must be at least 1, got 4.0 and 8, and rope_theta above 1, got 1.0"),
    ({**L3, "low_freq_factor": 6.0}, f"low_freq_factor must be below high_freq_factor in {SCALING}, got 6.0 and 4.0"),
    *((value, f"{SCALING} must be an object, got {value!r}") for value in ("llama3", 3, [1])),
]


@pytest.mark.parametrize(("scaling", "message"), WRONG)
def test_invalid_scaling_is_rejected_by_field(scaling, message):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read(rope_scaling=scaling)


@pytest.mark.parametrize(
    "config", [{"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}]
)
def test_partial_rotary_heads_are_rejected(config):
    with pytest.raises(CheckpointError, match=r"must be 1, got 0\.5"):
        read_decoder(ConfigReader(config, "config.json"), no_windows)


@pytest.mark.parametrize(("made_on", "device"), [("meta", "cpu"), ("cuda", "cuda")])
def test_rope_table_follows_device_except_meta(made_on, device):
    with FakeTensorMode(), torch.device(made_on):
        table = RotaryEmbedding(make_config()).table
    assert table.device.type == device
