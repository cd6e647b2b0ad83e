"""A pair on disk, and its additional drafts: what is loaded, what stays unchanged, and what is rejected."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_decode.models import (
    CheckpointError,
    EagleDraft,
    LlamaTarget,
    draft_names,
    load_pair,
    load_target,
    quantise_draft,
    save_draft,
    save_pair,
)
from spec_decode.models.dflash import DFlash
from spec_decode.models.load import load_draft
from tests.factories import make_config, make_latent_config, make_pair
from tests.spec_decode.models.generated import make_dflash


def make_latent_draft(**changes):
    return make_pair(None, make_latent_config(**changes))[1]


def make_block_draft(folder, target=None, **changes):
    """A block draft of a pair's target, or of another, as its loader makes it of a checkpoint."""
    target = target or make_pair()[0]
    sizes = {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size, "target_hidden": target.hidden_size}
    checkpoint = make_dflash(**{"num_states": 1, "qk_norm": True, **sizes, **changes})
    return load_draft(checkpoint.write(folder), target, dtype=next(target.parameters()).dtype)


@pytest.fixture
def folder(tmp_path):
    save_pair(tmp_path / "pair", *make_pair(), {"steps": 3})
    return tmp_path / "pair"


@pytest.fixture
def further(folder, tmp_path):
    """A pair with two more drafts."""
    save_draft(folder, "latent_draft", make_latent_draft(), {"steps": 5})
    save_draft(folder, "block_draft", make_block_draft(tmp_path / "published"), {"steps": 7})
    return folder


def change_config(folder, change):
    path = folder / "config.json"
    configs = json.loads(path.read_text())
    change(configs)
    path.write_text(json.dumps(configs))


def refusal(folder, draft="draft"):
    with pytest.raises(CheckpointError) as refused:
        load_pair(folder, draft=draft)
    return str(refused.value)


def files(folder):
    """The content of each file by its path in the folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_stored(saved, loaded):
    """The same in bf16 precision."""
    state = loaded.state_dict()
    assert type(loaded) is type(saved) and saved.config == loaded.config and saved.state_dict().keys() == state.keys()
    for name, value in saved.state_dict().items():
        assert torch.equal(value.bfloat16().float(), state[name]), name


def test_pair_loads_in_bf16_ready_to_run(folder):
    target, draft = load_pair(folder)
    for saved, loaded in zip(make_pair(), (target, draft), strict=True):
        assert_stored(saved, loaded)
        assert not loaded.training and not any(parameter.requires_grad for parameter in loaded.parameters())
    assert draft.shared.model is target and draft.embedding is target.embed.weight


def test_saving_loaded_pair_changes_nothing(folder, tmp_path):
    save_pair(tmp_path / "again", *load_pair(folder), {"steps": 3})
    assert files(tmp_path / "again") == files(folder)
    assert json.loads((folder / "training.json").read_text()) == {"steps": 3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parameters_get_dtype_but_sinks_stay_fp32(further, dtype):
    for model in load_pair(further, draft="latent_draft", dtype=dtype):
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        assert dtypes.pop("layers.0.sinks", torch.float32) == torch.float32 and set(dtypes.values()) == {dtype}
        assert model.rotary.table.dtype == torch.float32


def test_sliding_window_is_saved(tmp_path):
    config = make_config(sliding_window=7)
    target = LlamaTarget(config)
    save_pair(tmp_path, target, EagleDraft(config, target), {})
    assert load_pair(tmp_path)[0].config.sliding_window == 7


def test_config_without_latent_field_is_read(folder):
    change_config(folder, lambda configs: [config.pop("latent") for config in configs.values()])
    assert load_pair(folder)[1].config == make_config()


@pytest.mark.parametrize("name", ["config.json", "target.safetensors", "draft.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    assert str(folder / name) in refusal(folder)


@pytest.mark.parametrize("kept", [0, 4, 200, -1])
def test_a_truncated_file_is_named(folder, kept):
    for name in ("draft.safetensors", "target.safetensors"):
        path = folder / name
        path.write_bytes(path.read_bytes()[:kept])
        assert f"{path} cannot be read as safetensors" in refusal(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"target": 3}', '{"target": {"vocab_size": 4}}'])
def test_an_invalid_config_is_named(folder, text):
    (folder / "config.json").write_text(text)
    assert str(folder / "config.json") in refusal(folder)


OF_THE_WEIGHTS = {
    "another shape": (
        "draft",
        {"norm.weight": torch.ones(31)},
        ["norm.weight: copying", "torch.Size([31])", "torch.Size([32])"],
    ),
    "a missing tensor": ("target", {"lm_head.weight": None}, ['Missing key(s) in state_dict: "lm_head.weight"']),
    "all of it at once": (
        "draft",
        {"norm.weight": torch.ones(31), "more": torch.ones(1), "fuse.weight": None},
        [
            'Missing key(s) in state_dict: "fuse.weight"',
            'Unexpected key(s) in state_dict: "more"',
            "norm.weight: copying",
        ],
    ),
    "a long list": ("draft", {f"extra{i:0100}": torch.ones(1) for i in range(11)}, ["000. Use matching files."]),
}


@pytest.mark.parametrize(("model", "changes", "problems"), OF_THE_WEIGHTS.values(), ids=OF_THE_WEIGHTS)
def test_weights_misfitting_their_config_are_named(folder, model, changes, problems):
    path = folder / f"{model}.safetensors"
    state = load_file(path) | changes
    save_file({name: tensor for name, tensor in state.items() if tensor is not None}, path)
    message = refusal(folder)
    assert f"{path} does not fit its config.json: " in message and all(problem in message for problem in problems)


OF_THE_CONFIG = [
    ("draft", "target", {"intermediate_size": 48}, "gate_up.weight: copying a param with shape torch.Size([64, 32])"),
    ("draft", "target", {"num_layers": 2}, "layers.1."),
    ("draft", "target", None, "{folder}"),
    ("draft", "draft", None, "{folder}"),
    ("draft", "draft", {"vocab_size": 32}, "the draft in {folder} has vocab_size 32, the target 24"),
    ("draft", "draft", {"hidden_size": 40}, "the draft in {folder} has hidden_size 40, the target 32"),
    *(
        ("draft", "target", changes, "")
        for changes in ({"hidden_size": -4}, {"vocab_size": 10**12}, {"max_positions": -3}, {"norm_eps": -1})
    ),
    ("latent_draft", "latent_draft", {"vocab_size": 25}, "latent_draft in {folder} has vocab_size 25, the target 24"),
    ("latent_draft", "latent_draft", {"num_kv_heads": 2}, "num_kv_heads must be 1, got 2"),
    (
        "latent_draft",
        "target",
        {"latent": {"rope_dim": 8, "q_rank": 24, "out_rank": 24, "value_dim": None, "sinks": True}},
        "Leave latent out of its config",
    ),
]
"""The draft asked for, whose config changes, and how; None: it is said to lie in a folder of its own."""


@pytest.mark.parametrize(("draft", "model", "changes", "problem"), OF_THE_CONFIG)
def test_a_config_of_other_models_is_refused(further, draft, model, changes, problem):
    change_config(further, lambda configs: configs.update({model: changes and configs[model] | changes}))
    assert problem.format(folder=further) in refusal(further, draft)


def test_unknown_draft_is_rejected_with_known_ones(further):
    for name in ("latent_draf", "target", "config", ""):
        problem = f"the drafts in {further} are draft, block_draft, latent_draft, got {name!r}"
        assert problem in refusal(further, name)
    change_config(further, lambda configs: configs.pop("draft"))
    assert "lacks ['draft']" in refusal(further)


def test_further_drafts_load_with_same_target(further, tmp_path):
    saved = {"latent_draft": make_latent_draft(), "block_draft": make_block_draft(tmp_path / "again")}
    for name, draft in saved.items():
        target, loaded = load_pair(further, draft=name)
        assert_stored(draft, loaded)
        assert_stored(make_pair()[0], target)
    assert loaded.mask_token_id == draft.mask_token_id and loaded.shared.model is target
    assert_stored(make_pair()[0], load_target(further))


@pytest.mark.parametrize("changes", [{"qk_norm": False}, {"own_embedding": True, "own_head": True}])
def test_block_draft_of_any_parts_round_trips(folder, tmp_path, changes):
    saved = make_block_draft(tmp_path / "published", **changes)
    save_draft(folder, "block_draft", saved, {})
    assert_stored(saved, load_pair(folder, draft="block_draft")[1])


def test_further_draft_leaves_others_unchanged(further, tmp_path):
    before = files(further)
    for name, draft, new in (
        ("another", make_latent_draft(sliding_window=9), {"another.safetensors", "another.training.json"}),
        ("blocks", make_block_draft(tmp_path / "new"), {f"blocks/{f}" for f in (
            "config.json", "model.safetensors", "training.json")}),
    ):  # fmt: skip
        save_draft(further, name, draft, {"steps": 9})
        after = files(further)
        record = next(name for name in new if "training" in name)
        assert after.keys() - before.keys() == new and json.loads(after[record]) == {"steps": 9}
        was, now = (json.loads(found.pop("config.json")) for found in (before, after))
        assert {other: config for other, config in now.items() if other != name} == was
        assert {path: after[path] for path in before} == before
        before = files(further)
    assert draft_names(further) == ["draft", "another", "block_draft", "blocks", "latent_draft"]
    assert load_pair(further, draft="another")[1].config.sliding_window == 9
    assert type(load_pair(further)[1]) is EagleDraft


def test_draft_can_be_replaced_by_either_kind(further, tmp_path):
    save_draft(further, "block_draft", make_latent_draft(sliding_window=9), {})
    assert load_pair(further, draft="block_draft")[1].config.sliding_window == 9
    save_draft(further, "block_draft", make_block_draft(tmp_path / "again", seed=1), {})
    assert type(load_pair(further, draft="block_draft")[1]) is DFlash
    assert draft_names(further) == ["draft", "block_draft", "latent_draft"]


def test_a_new_pair_has_no_further_drafts(further):
    save_pair(further, *make_pair(seed=1), {})
    assert draft_names(further) == ["draft"]


@pytest.mark.parametrize(
    ("draft", "name"),
    [
        ("latent_draft", "latent_draft.safetensors"),
        ("block_draft", "block_draft/config.json"),
        ("block_draft", "block_draft/model.safetensors"),
    ],
)
def test_further_draft_missing_a_file_is_named(further, draft, name):
    (further / name).unlink()
    assert str((further / name).parent) in refusal(further, draft)
    load_pair(further)


def test_unsuitable_draft_is_rejected_before_writing(folder, tmp_path):
    before, config = files(folder), make_config(hidden_size=64)
    for name in ("target", "draft", "", "a/b", "../up", "config.json"):
        with pytest.raises(CheckpointError, match="name must be an identifier"):
            save_draft(folder, name, make_latent_draft(), {})
    for wide in (EagleDraft(config, LlamaTarget(config)), make_block_draft(tmp_path / "wide", make_pair(config)[0])):
        with pytest.raises(CheckpointError, match="has hidden_size 64, the target 32"):
            save_draft(folder, "wide", wide, {})
    assert files(folder) == before
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        save_draft(tmp_path / "nowhere", "latent_draft", make_latent_draft(), {})


def test_block_draft_is_saved_in_published_layout(further, tmp_path):
    own, published = further / "block_draft", tmp_path / "published"
    assert json.loads((own / "config.json").read_text()) == json.loads((published / "config.json").read_text())
    ours, theirs = (load_file(place / "model.safetensors") for place in (own, published))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, theirs[name].bfloat16())
    before, loaded = files(further), load_pair(further, draft="block_draft", dtype=torch.bfloat16)[1]
    save_draft(further, "block_draft", loaded, {"steps": 7})
    assert files(further) == before


def test_block_draft_of_unavailable_states_is_rejected(further):
    save_pair(further, *make_pair(make_config(num_layers=2)), {})
    change_config(further, lambda configs: configs.update(block_draft=None))
    message = refusal(further, "block_draft")
    assert "target_layer_ids" in message and "the target's last layer, 1, got [0]" in message


def test_fp8_draft_cannot_be_saved(folder, tmp_path):
    target, draft = (model.bfloat16() for model in make_pair())
    block = make_block_draft(tmp_path / "published", target)
    for each in (draft, block):
        quantise_draft(each)
        before = sorted(path.name for path in tmp_path.rglob("*"))
        with pytest.raises(CheckpointError, match=r"8-bit weights.* Save it before quantise_draft"):
            save_draft(folder, "another", each, {})
        with pytest.raises(CheckpointError, match="8-bit weights"):
            save_pair(tmp_path / "new", target, each, {})
        assert sorted(path.name for path in tmp_path.rglob("*")) == before
