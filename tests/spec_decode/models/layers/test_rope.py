import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_decode.models import CheckpointError
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.decoder_config import read_decoder
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


def refusal(**config):
    with pytest.raises(CheckpointError) as refused:
        read(**config)
    return str(refused.value)


@given(
    factor=st.floats(1, 64),
    low=st.floats(0.5, 4),
    above=st.floats(0.1, 8),
    original=st.integers(64, 65536),
    frequency=st.floats(1e-6, 1),
)
def test_llama3_scaling_is_the_published_rule_by_wavelengths(factor, low, above, original, frequency):
    fields = {"factor": factor, "low_freq_factor": low, "high_freq_factor": low + above}
    scaling = Llama3Scaling(**fields, original_max_position_embeddings=original)
    found = scaling.scaled(torch.tensor([frequency], dtype=torch.float64))
    expected = llama3(frequency, {**fields, "original_max_position_embeddings": original})
    assert float(found) == pytest.approx(expected, rel=1e-9)


def test_linear_scaling_brings_positions_closer_together():
    config = make_config(max_positions=40)
    scaling = read(rope_scaling={"type": "linear", "factor": 4})[1]
    scaled = RotaryEmbedding(config, scaling).table
    assert torch.allclose(scaled[::4], RotaryEmbedding(config).table[:10], atol=1e-6)


def test_a_scaled_table_is_no_part_of_the_state():
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
def test_old_and_new_configs_say_the_same(config):
    assert read(**config) == (700.0, Llama3Scaling(**LLAMA3))


@pytest.mark.parametrize("config", [{}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}])
def test_a_config_without_scaling_has_none(config):
    assert read(**config) == (10000.0, None)


@pytest.mark.parametrize("kind", ["yarn", "longrope", "dynamic"])
def test_an_unknown_scaling_is_refused_by_name_with_the_known_ones(kind):
    message = refusal(rope_scaling={"rope_type": kind, "factor": 4.0})
    assert f"rope_type in rope_scaling in config.json must be default, linear or llama3, got {kind!r}" in message


@pytest.mark.parametrize("field", LLAMA3)
def test_a_scaling_without_a_field_is_refused_by_its_name(field):
    fields = {name: value for name, value in LLAMA3.items() if name != field}
    assert f"must say {field}" in refusal(rope_scaling={"rope_type": "llama3", **fields})


def test_a_factor_that_is_no_number_is_refused():
    message = refusal(rope_scaling={"rope_type": "linear", "factor": float("nan")})
    assert "factor in rope_scaling in config.json must be a number between" in message


@pytest.mark.parametrize("value", [0, -2.0])
def test_a_factor_that_is_not_positive_is_refused(value):
    message = refusal(rope_scaling={"rope_type": "linear", "factor": value})
    assert "factor in rope_scaling in config.json must be positive, got" in message


def test_frequencies_in_the_wrong_order_are_refused_with_both():
    message = refusal(rope_scaling={"rope_type": "llama3", **LLAMA3, "low_freq_factor": 6.0})
    assert "must be below high_freq_factor" in message and "6.0 and 4.0" in message


@pytest.mark.parametrize(
    "config", [{"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}]
)
def test_heads_that_are_rotated_in_part_are_refused(config):
    with pytest.raises(CheckpointError, match=r"must be 1, got 0\.5"):
        read_decoder(ConfigReader(config, "config.json"))


@pytest.mark.parametrize("value", ["llama3", 3, [1]])
def test_a_scaling_that_is_no_object_is_refused(value):
    assert f"rope_scaling in config.json must be an object, got {value!r}" in refusal(rope_scaling=value)
