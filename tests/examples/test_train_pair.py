"""An additional draft of a target, trained and saved next to it: end to end on a pair that trains in seconds."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
SHIPPED = {**FURTHER_DRAFTS}
STEPS, PLACES = {"unroll", "step_weight", "hidden_weight"}, {"blocks", "place_weight"}
OF_ANOTHER = {"latent_draft": PLACES, "block_draft": STEPS}
"""Settings that the training of the other kind has alone."""


@dataclass(frozen=True)
class Trained:
    """What training a draft left beside a byte-level pair too small to say anything, and what was there before."""

    name: str
    folder: Path
    record: dict[str, Any]
    target: bytes

    def file(self, latent: str, block: str) -> Path:
        return self.folder / (latent if self.name == "latent_draft" else block)

    @property
    def weights(self) -> bytes:
        return self.file("latent_draft.safetensors", "block_draft/model.safetensors").read_bytes()


@pytest.fixture(scope="module", params=OF_ANOTHER)
def trained(request, tmp_path_factory):
    folder, config = tmp_path_factory.mktemp("pair"), make_config(vocab_size=256, max_positions=256)
    save_pair(folder, *make_pair(config), {"steps": 3})
    before = (folder / "target.safetensors").read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FURTHER_DRAFTS, "latent_draft", make_latent_config(vocab_size=256, max_positions=256))
        patch.setitem(FURTHER_DRAFTS, "block_draft", make_block_config(config))
        patch.setattr(Windows, "every", lambda self, stride, length: self.draw(6, length))
        record = train_draft(folder, request.param, RECIPE, CPU, {"command": "here"})
        yield Trained(request.param, folder, record, before)


def test_further_draft_is_trained_on_existing_target(trained):
    assert (trained.folder / "target.safetensors").read_bytes() == trained.target
    assert draft_names(trained.folder) == ["draft", trained.name]
    saved = trained.file("latent_draft.training.json", "block_draft/training.json").read_text()
    assert trained.record == json.loads(saved, object_hook=curves_as_tuples)
    assert trained.record["command"] == "here" and trained.record["accepted_of_4_per_round"] >= 0


def curves_as_tuples(record):
    return record | {name: [tuple(point) for point in record[name]] for name in record if name.endswith("curve")}


def test_training_record_names_only_its_own_settings(trained):
    named, others = trained.record["recipe"], OF_ANOTHER[trained.name]
    assert named["draft_steps"] == 12 and (STEPS | PLACES) - others <= named.keys()
    assert not {"target_steps", "target_lr", "target_decay", "byte_noise", *others} & named.keys()
    assert "target_curve" not in trained.record


def test_training_lowers_loss_and_moves_every_parameter(trained):
    assert trained.record["draft_curve"][-1][1] < trained.record["draft_curve"][0][1]
    draft = load_pair(trained.folder, draft=trained.name)[1]
    torch.manual_seed(RECIPE.seed)
    fresh = make_draft(FURTHER_DRAFTS[trained.name], load_target(trained.folder), CPU)
    for name, parameter in draft.named_parameters():
        assert not torch.equal(parameter, fresh.get_parameter(name).bfloat16().float()), name


@pytest.mark.outside_inference_mode
def test_training_twice_gives_the_same_draft(trained):
    before = trained.weights
    train_draft(trained.folder, trained.name, RECIPE, CPU, {"command": "here"})
    assert trained.weights == before


def test_training_without_target_raises(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        train_draft(tmp_path, "latent_draft", RECIPE, CPU, {})


def test_engine_with_trained_draft_matches_plain_decoding(trained):
    pair, texts = load_pair(trained.folder, draft=trained.name), []
    for steps in (0, 1, 4):
        config = engine_config(num_speculative_tokens=steps, max_model_len=64, max_num_seqs=2)
        engine = Engine(*pair, get("torch_reference"), config)
        requests = [make_request(prompt=encode(prompt), max_tokens=12) for prompt in ("The for statement", "x")]
        texts.append([generation.token_ids for generation in engine.generate(requests)])
    assert texts[0] == texts[1] == texts[2]


def test_mask_token_is_no_byte_of_text():
    mask = SHIPPED["block_draft"]["dflash_config"]["mask_token_id"]
    every = "".join(chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000)
    assert mask not in every.encode()


def test_shipped_latent_draft_has_dims_of_latent_kernels():
    spec = SHIPPED["latent_draft"].attention_spec(64, torch.bfloat16)
    assert (spec.head_dim, spec.out_dim, spec.sliding_window, spec.sinks) == (512, 512, 128, True)
    assert SHIPPED["latent_draft"].hidden_size == TARGET.hidden_size


def test_the_block_draft_fits_the_shipped_target():
    target = load_target(SHIPPED_PAIR)
    draft = make_draft(SHIPPED["block_draft"], target, CPU)
    assert draft.embed is None and isinstance(draft.lm_head, TargetHead) and draft.hidden_size == target.hidden_size
    assert all(parameter.requires_grad for parameter in draft.parameters())
    assert [(group.spec.causal, group.spec.sliding_window) for group in draft.layer_groups(16)] == [(False, None)]
