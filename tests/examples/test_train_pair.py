"""One more draft of a target, trained and stored beside it: the whole way on a pair that trains in seconds."""

import json

import pytest
import torch
from train_pair.losses import Windows
from train_pair.recipe import FURTHER_DRAFTS, TARGET, Recipe
from train_pair.training import train_draft

from spec_decode.models import CheckpointError, draft_names, load_pair, save_pair
from tests.factories import CPU, make_config, make_latent_config, make_pair

RECIPE = Recipe(draft_steps=12, batch=4, window=16, unroll=2, written=8, prompts=2, rounds=2)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A byte-level pair too small to say anything, and a latent draft of its size to train."""
    save_pair(tmp_path, *make_pair(make_config(vocab_size=256, max_positions=256)), {"steps": 3})
    config = make_latent_config(vocab_size=256, max_positions=256)
    monkeypatch.setitem(FURTHER_DRAFTS, "latent_draft", config)
    monkeypatch.setattr(Windows, "every", lambda self, stride, length: self.draw(6, length))
    return tmp_path


def test_a_further_draft_is_trained_on_the_target_that_is_there(folder):
    before = (folder / "target.safetensors").read_bytes()
    record = train_draft(folder, "latent_draft", RECIPE, CPU, {"command": "here"})
    assert (folder / "target.safetensors").read_bytes() == before
    assert draft_names(folder) == ["draft", "latent_draft"]
    assert record == json.loads((folder / "latent_draft.training.json").read_text(), object_hook=curves_as_tuples)
    assert record["command"] == "here" and record["accepted_of_4_per_round"] >= 0


def curves_as_tuples(record):
    return record | {name: [tuple(point) for point in record[name]] for name in record if name.endswith("curve")}


def test_its_record_names_no_setting_of_the_target(folder):
    record = train_draft(folder, "latent_draft", RECIPE, CPU, {})
    assert record["recipe"]["draft_steps"] == 12
    assert not {"target_steps", "target_lr", "target_decay", "byte_noise"} & record["recipe"].keys()
    assert "target_curve" not in record


def test_its_held_out_loss_falls_and_every_parameter_moves(folder):
    record = train_draft(folder, "latent_draft", RECIPE, CPU, {})
    assert record["draft_curve"][-1][1] < record["draft_curve"][0][1]
    trained = load_pair(folder, draft="latent_draft")[1]
    torch.manual_seed(RECIPE.seed)
    fresh = type(trained)(trained.config, load_pair(folder)[0])
    for name, parameter in trained.named_parameters():
        assert not torch.equal(parameter, fresh.get_parameter(name).bfloat16().float()), name


def test_training_twice_gives_the_same_draft(folder):
    found = []
    for _ in range(2):
        train_draft(folder, "latent_draft", RECIPE, CPU, {})
        found.append((folder / "latent_draft.safetensors").read_bytes())
    assert found[0] == found[1]


def test_without_a_target_nothing_is_trained(tmp_path):
    with pytest.raises(CheckpointError, match="nothing was loaded"):
        train_draft(tmp_path, "latent_draft", RECIPE, CPU, {})


def test_the_shipped_latent_draft_has_the_dims_that_latent_kernels_are_made_for():
    spec = FURTHER_DRAFTS["latent_draft"].attention_spec(64, torch.bfloat16)
    assert (spec.head_dim, spec.out_dim, spec.sliding_window, spec.sinks) == (512, 512, 128, True)
    assert FURTHER_DRAFTS["latent_draft"].hidden_size == TARGET.hidden_size
