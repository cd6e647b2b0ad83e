"""One more draft of a target, trained and stored beside it: the whole way on a pair that trains in seconds."""

import json

import pytest
import torch
from train_pair.drafts import make_draft
from train_pair.losses import Windows
from train_pair.recipe import FURTHER_DRAFTS, TARGET, Recipe
from train_pair.training import train_draft

from attn_backends import get
from spec_decode.engine import Engine
from spec_decode.llm.byte_tokenizer import encode
from spec_decode.models import SHIPPED_PAIR, CheckpointError, draft_names, load_pair, load_target, save_pair
from spec_decode.models.target_head import TargetHead
from tests.factories import (
    CPU,
    engine_config,
    make_block_config,
    make_config,
    make_latent_config,
    make_pair,
    make_request,
)

RECIPE = Recipe(draft_steps=12, batch=4, window=16, unroll=2, written=8, prompts=2, rounds=2, blocks=8)
NAMES = pytest.mark.parametrize("name", ["latent_draft", "block_draft"])
WEIGHTS = {"latent_draft": "latent_draft.safetensors", "block_draft": "block_draft/model.safetensors"}
RECORDS = {"latent_draft": "latent_draft.training.json", "block_draft": "block_draft/training.json"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A byte-level pair too small to say anything, and further drafts of its size to train."""
    config = make_config(vocab_size=256, max_positions=256)
    save_pair(tmp_path, *make_pair(config), {"steps": 3})
    monkeypatch.setitem(FURTHER_DRAFTS, "latent_draft", make_latent_config(vocab_size=256, max_positions=256))
    monkeypatch.setitem(FURTHER_DRAFTS, "block_draft", make_block_config(config))
    monkeypatch.setattr(Windows, "every", lambda self, stride, length: self.draw(6, length))
    return tmp_path


@NAMES
def test_a_further_draft_is_trained_on_the_target_that_is_there(folder, name):
    before = (folder / "target.safetensors").read_bytes()
    record = train_draft(folder, name, RECIPE, CPU, {"command": "here"})
    assert (folder / "target.safetensors").read_bytes() == before
    assert draft_names(folder) == ["draft", name]
    assert record == json.loads((folder / RECORDS[name]).read_text(), object_hook=curves_as_tuples)
    assert record["command"] == "here" and record["accepted_of_4_per_round"] >= 0


def curves_as_tuples(record):
    return record | {name: [tuple(point) for point in record[name]] for name in record if name.endswith("curve")}


@pytest.mark.parametrize(
    ("name", "own", "others"),
    [
        ("latent_draft", {"unroll", "step_weight", "hidden_weight"}, {"blocks", "place_weight"}),
        ("block_draft", {"blocks", "place_weight"}, {"unroll", "step_weight", "hidden_weight"}),
    ],
)
def test_its_record_names_its_own_settings_alone(folder, name, own, others):
    record = train_draft(folder, name, RECIPE, CPU, {})
    assert record["recipe"]["draft_steps"] == 12 and own <= record["recipe"].keys()
    assert not {"target_steps", "target_lr", "target_decay", "byte_noise", *others} & record["recipe"].keys()
    assert "target_curve" not in record


@NAMES
def test_its_held_out_loss_falls_and_every_parameter_moves(folder, name):
    record = train_draft(folder, name, RECIPE, CPU, {})
    assert record["draft_curve"][-1][1] < record["draft_curve"][0][1]
    trained = load_pair(folder, draft=name)[1]
    torch.manual_seed(RECIPE.seed)
    fresh = make_draft(FURTHER_DRAFTS[name], load_target(folder), CPU)
    for parameter_name, parameter in trained.named_parameters():
        assert not torch.equal(parameter, fresh.get_parameter(parameter_name).bfloat16().float()), parameter_name


@NAMES
def test_training_twice_gives_the_same_draft(folder, name):
    found = []
    for _ in range(2):
        train_draft(folder, name, RECIPE, CPU, {})
        found.append((folder / WEIGHTS[name]).read_bytes())
    assert found[0] == found[1]


@NAMES
def test_without_a_target_nothing_is_trained(tmp_path, name):
    with pytest.raises(CheckpointError, match=r"config\.json, which cannot be read"):
        train_draft(tmp_path, name, RECIPE, CPU, {})


@NAMES
def test_an_engine_that_drafts_with_it_writes_what_plain_decoding_does(folder, name):
    train_draft(folder, name, RECIPE, CPU, {})
    pair, texts = load_pair(folder, draft=name), []
    for steps in (0, 1, 4):
        config = engine_config(num_speculative_tokens=steps, max_model_len=64)
        engine = Engine(*pair, get("torch_reference"), config)
        requests = [make_request(prompt=encode(prompt), max_tokens=20) for prompt in ("The for statement", "x")]
        texts.append([made.token_ids for made in engine.generate(requests)])
    assert texts[0] == texts[1] == texts[2]


def test_a_mask_is_no_byte_of_a_text():
    mask = FURTHER_DRAFTS["block_draft"]["dflash_config"]["mask_token_id"]
    every = "".join(chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000)
    assert mask not in every.encode()


def test_the_shipped_latent_draft_has_the_dims_that_latent_kernels_are_made_for():
    spec = FURTHER_DRAFTS["latent_draft"].attention_spec(64, torch.bfloat16)
    assert (spec.head_dim, spec.out_dim, spec.sliding_window, spec.sinks) == (512, 512, 128, True)
    assert FURTHER_DRAFTS["latent_draft"].hidden_size == TARGET.hidden_size


def test_the_block_draft_fits_the_shipped_target():
    target = load_target(SHIPPED_PAIR)
    draft = make_draft(FURTHER_DRAFTS["block_draft"], target, CPU)
    assert draft.embed is None and isinstance(draft.lm_head, TargetHead) and draft.hidden_size == target.hidden_size
    assert all(parameter.requires_grad for parameter in draft.parameters())
    assert [(group.spec.causal, group.spec.sliding_window) for group in draft.layer_groups(16)] == [(False, None)]
