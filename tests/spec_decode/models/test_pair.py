import json
from dataclasses import asdict

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


@pytest.fixture
def folder(tmp_path):
    save_pair(tmp_path / "pair", *make_pair(), {"steps": 3})
    return tmp_path / "pair"


def make_latent_draft(**changes):
    return make_pair(None, make_latent_config(**changes))[1]


@pytest.fixture
def further(folder):
    """A pair with one more draft."""
    save_draft(folder, "latent_draft", make_latent_draft(), {"steps": 5})
    return folder


def make_block_draft(folder, target=None, **changes):
    """A block draft of a pair's target, or of another, as its loader makes it of a checkpoint."""
    target = target or make_pair()[0]
    sizes = {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size, "target_hidden": target.hidden_size}
    checkpoint = make_dflash(**{"num_states": 1, "qk_norm": True, **sizes, **changes})
    return load_draft(checkpoint.write(folder), target, dtype=next(target.parameters()).dtype)


@pytest.fixture
def with_block(folder, tmp_path):
    """A pair with a block draft."""
    save_draft(folder, "block_draft", make_block_draft(tmp_path / "published"), {"steps": 5})
    return folder


def change_state(folder, change, name="draft"):
    path = folder / f"{name}.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path)
    return path


def change_config(folder, model, **fields):
    path = folder / "config.json"
    configs = json.loads(path.read_text())
    configs[model].update(fields)
    path.write_text(json.dumps(configs))


def refusal(folder, draft="draft"):
    with pytest.raises(CheckpointError) as refused:
        load_pair(folder, draft=draft)
    return str(refused.value)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_pair_comes_back_in_bf16_precision(folder):
    for saved, loaded in zip(make_pair(), load_pair(folder), strict=True):
        state = loaded.state_dict()
        assert saved.config == loaded.config and saved.state_dict().keys() == state.keys()
        for name, value in saved.state_dict().items():
            assert torch.equal(value.bfloat16().float(), state[name])


def test_storing_a_loaded_pair_again_changes_nothing(folder, tmp_path):
    save_pair(tmp_path / "again", *load_pair(folder), {"steps": 3})
    for name in ("config.json", "training.json", "target.safetensors", "draft.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_the_training_record_travels_along(folder):
    assert json.loads((folder / "training.json").read_text()) == {"steps": 3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_take_the_dtype_and_the_rotary_tables_stay_fp32(folder, dtype):
    target, draft = load_pair(folder, dtype=dtype)
    for model in (target, draft):
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert model.rotary.table.dtype == torch.float32


def test_a_loaded_pair_is_ready_to_run(folder):
    for model in load_pair(folder):
        assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())


def test_the_draft_shares_the_targets_embedding(folder):
    target, draft = load_pair(folder)
    assert draft._shared[0] is target.embed and draft._shared[1] is target.lm_head


def test_a_missing_folder_is_named(tmp_path):
    assert f"{tmp_path / 'nowhere' / 'config.json'}, which cannot be read: No such file" in refusal(
        tmp_path / "nowhere"
    )


@pytest.mark.parametrize("name", ["config.json", "target.safetensors", "draft.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    assert str(folder / name) in refusal(folder)


@pytest.mark.parametrize("kept", [0, 4, 200, -1])
@pytest.mark.parametrize("name", ["target.safetensors", "draft.safetensors"])
def test_a_truncated_file_is_named(folder, name, kept):
    path = folder / name
    path.write_bytes(path.read_bytes()[:kept])
    assert f"{path} cannot be read as safetensors" in refusal(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"target": 3}', '{"target": {"vocab_size": 4}}'])
def test_a_config_that_is_none_is_named(folder, text):
    (folder / "config.json").write_text(text)
    assert str(folder / "config.json") in refusal(folder)


def test_a_config_without_the_draft_says_so(folder):
    configs = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"target": configs["target"]}))
    assert "lacks ['draft']" in refusal(folder)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder):
    path = change_state(folder, lambda state: state.update({"norm.weight": torch.ones(31)}))
    assert f"{path} does not fit its config.json: norm.weight must be (32,), got (31,)" in refusal(folder)


def test_a_missing_tensor_is_named(folder):
    path = change_state(folder, lambda state: state.pop("lm_head.weight"), "target")
    assert f"{path} does not fit its config.json: lm_head.weight is missing" in refusal(folder)


def test_an_extra_tensor_is_named(folder):
    change_state(folder, lambda state: state.update({"layer.bias": torch.ones(2)}))
    assert "layer.bias is not part of the model" in refusal(folder)


def test_every_problem_is_named_at_once(folder):
    def change(state):
        state.update({"norm.weight": torch.ones(31), "more": torch.ones(1)})
        state.pop("fuse.weight")

    change_state(folder, change)
    for problem in ("fuse.weight is missing", "more is not part", "norm.weight must be"):
        assert problem in refusal(folder)


def test_a_long_list_of_problems_is_cut_and_counted(folder):
    change_state(folder, lambda state: state.update({f"extra{i}": torch.ones(1) for i in range(11)}))
    assert "and 3 more" in refusal(folder)


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size"])
def test_a_draft_of_another_target_is_refused_with_both_numbers(folder, name):
    wanted = asdict(make_config())[name]
    change_config(folder, "draft", **{name: wanted + 8})
    assert f"shares its target's {name}, the draft in {folder} has {wanted + 8} and the target {wanted}" in refusal(
        folder
    )


def test_a_config_of_other_sizes_than_the_weights_is_refused(folder):
    change_config(folder, "target", intermediate_size=48)
    assert "gate_up.weight must be (96, 32), got (64, 32)" in refusal(folder)


def test_weights_of_another_number_of_layers_are_refused(folder):
    change_config(folder, "target", num_layers=2)
    assert "layers.1." in refusal(folder) and "is missing" in refusal(folder)


def test_a_sliding_window_is_stored(tmp_path):
    config = make_config(sliding_window=7)
    target = LlamaTarget(config)
    save_pair(tmp_path, target, EagleDraft(config, target), {})
    assert load_pair(tmp_path)[0].config.sliding_window == 7


@pytest.mark.parametrize(
    "changes", [{"hidden_size": -4}, {"vocab_size": 10**12}, {"max_positions": -3}, {"norm_eps": -1}]
)
def test_a_config_that_describes_no_model_is_a_checkpoint_error(tmp_path, changes):
    save_pair(tmp_path, *make_pair(), {})
    path = tmp_path / "config.json"
    configs = json.loads(path.read_text())
    for config in configs.values():
        config.update(changes)
    path.write_text(json.dumps(configs))
    with pytest.raises(CheckpointError):
        load_pair(tmp_path)


def test_a_further_draft_comes_back_in_bf16_precision(further):
    saved, loaded = make_latent_draft(), load_pair(further, draft="latent_draft")[1]
    state = loaded.state_dict()
    assert saved.config == loaded.config and saved.state_dict().keys() == state.keys()
    for name, value in saved.state_dict().items():
        assert torch.equal(value.bfloat16().float(), state[name])


def test_a_further_draft_leaves_the_pair_as_it_is(folder):
    before = files(folder)
    save_draft(folder, "latent_draft", make_latent_draft(), {"steps": 5})
    after = files(folder)
    assert after.keys() - before.keys() == {"latent_draft.safetensors", "latent_draft.training.json"}
    configs, extended = (json.loads(found["config.json"]) for found in (before, after))
    assert extended.pop("latent_draft")["latent"]["rope_dim"] == 8 and extended == configs
    assert {name: after[name] for name in before if name != "config.json"} == {
        name: content for name, content in before.items() if name != "config.json"
    }


def test_each_draft_has_its_own_training_record(further):
    assert json.loads((further / "latent_draft.training.json").read_text()) == {"steps": 5}
    assert json.loads((further / "training.json").read_text()) == {"steps": 3}


def test_a_further_draft_can_be_replaced(further):
    save_draft(further, "latent_draft", make_latent_draft(sliding_window=9), {"steps": 7})
    assert load_pair(further, draft="latent_draft")[1].config.sliding_window == 9


def test_the_draft_of_the_pair_comes_first_among_those_in_a_folder(further):
    save_draft(further, "another", make_latent_draft(), {})
    assert draft_names(further) == ["draft", "another", "latent_draft"]


def test_a_new_pair_has_no_further_drafts(further):
    save_pair(further, *make_pair(seed=1), {})
    assert draft_names(further) == ["draft"]


def test_both_drafts_share_one_targets_weights(further):
    states = [load_pair(further, draft=name)[0].state_dict() for name in draft_names(further)]
    states.append(load_target(further).state_dict())
    for name, value in states[0].items():
        assert all(torch.equal(value, state[name]) for state in states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sinks_stay_fp32_in_every_dtype(further, dtype):
    draft = load_pair(further, draft="latent_draft", dtype=dtype)[1]
    dtypes = {name: parameter.dtype for name, parameter in draft.named_parameters()}
    assert dtypes.pop("layer.sinks") == torch.float32 and set(dtypes.values()) == {dtype}


@pytest.mark.parametrize("name", ["latent_draf", "target", "config", ""])
def test_an_unknown_draft_is_refused_with_those_there(further, name):
    assert f"the drafts in {further} are draft, latent_draft, got {name!r}" in refusal(further, name)


def test_a_further_draft_without_its_file_is_named(further):
    (further / "latent_draft.safetensors").unlink()
    assert str(further / "latent_draft.safetensors") in refusal(further, "latent_draft")
    load_pair(further)


def test_a_further_draft_of_another_target_is_refused_with_its_name(further):
    change_config(further, "latent_draft", vocab_size=25)
    assert f"the latent_draft in {further} has 25 and the target 24" in refusal(further, "latent_draft")


@pytest.mark.parametrize("name", ["target", "draft", "", "a/b", "../up", "config.json"])
def test_a_name_that_no_further_draft_can_have_is_refused_before_anything_is_written(folder, name):
    before = files(folder)
    with pytest.raises(CheckpointError, match="named like a variable"):
        save_draft(folder, name, make_latent_draft(), {})
    assert files(folder) == before


def test_a_further_draft_of_another_hidden_size_is_refused_before_anything_is_written(folder):
    before, config = files(folder), make_config(hidden_size=64)
    with pytest.raises(CheckpointError, match="shares its target's hidden_size"):
        save_draft(folder, "wide", EagleDraft(config, LlamaTarget(config)), {})
    assert files(folder) == before


def test_a_further_draft_needs_a_pair(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json, which cannot be read"):
        save_draft(tmp_path, "latent_draft", make_latent_draft(), {})


def test_a_target_with_latents_is_a_checkpoint_error(further):
    path = further / "config.json"
    configs = json.loads(path.read_text())
    configs["target"] |= {"latent": configs["latent_draft"]["latent"]}
    path.write_text(json.dumps(configs))
    assert "Leave latent out of the target's config" in refusal(further)


def test_a_latent_that_no_layer_could_have_is_a_checkpoint_error(further):
    change_config(further, "latent_draft", num_kv_heads=2)
    assert "num_kv_heads must be 1, got 2" in refusal(further, "latent_draft")


def test_a_config_from_before_latents_is_read(folder):
    configs = json.loads((folder / "config.json").read_text())
    for config in configs.values():
        del config["latent"]
    (folder / "config.json").write_text(json.dumps(configs))
    assert load_pair(folder)[1].config == make_config()


@pytest.mark.parametrize("changes", [{}, {"qk_norm": False}, {"own_embedding": True, "own_head": True}])
def test_a_block_draft_comes_back_in_bf16_precision(folder, tmp_path, changes):
    saved = make_block_draft(tmp_path / "published", **changes)
    save_draft(folder, "block_draft", saved, {})
    target, loaded = load_pair(folder, draft="block_draft")
    assert type(loaded) is DFlash and loaded.config == saved.config and loaded.mask_token_id == saved.mask_token_id
    state = loaded.state_dict()
    assert saved.state_dict().keys() == state.keys()
    for name, value in saved.state_dict().items():
        assert torch.equal(value.bfloat16().float(), state[name])
    assert loaded._target[0] is target


def test_a_block_draft_is_stored_in_the_layout_in_which_such_drafts_are_published(with_block, tmp_path):
    own, published = with_block / "block_draft", tmp_path / "published"
    assert files(own).keys() == {"config.json", "model.safetensors", "training.json"}
    assert json.loads((own / "training.json").read_text()) == {"steps": 5}
    assert json.loads((own / "config.json").read_text()) == json.loads((published / "config.json").read_text())
    ours, theirs = (load_file(place / "model.safetensors") for place in (own, published))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, theirs[name].bfloat16())


def test_a_draft_that_was_loaded_in_bf16_is_stored_as_it_is(with_block):
    before = files(with_block / "block_draft")
    save_draft(
        with_block, "block_draft", load_pair(with_block, draft="block_draft", dtype=torch.bfloat16)[1], {"steps": 5}
    )
    assert files(with_block / "block_draft") == before


def test_a_block_draft_leaves_the_pair_and_further_drafts_as_they_are(further, tmp_path):
    before = {name: path.read_bytes() for name, path in ((p.name, p) for p in further.iterdir())}
    configs = json.loads(before.pop("config.json"))
    save_draft(further, "block_draft", make_block_draft(tmp_path / "published"), {})
    assert draft_names(further) == ["draft", "block_draft", "latent_draft"]
    assert json.loads((further / "config.json").read_text()) == configs | {"block_draft": None}
    assert {name: (further / name).read_bytes() for name in before} == before
    for name in ("draft", "latent_draft"):
        assert type(load_pair(further, draft=name)[1]) is EagleDraft


def test_a_draft_can_be_replaced_by_one_of_the_other_kind(with_block, tmp_path):
    save_draft(with_block, "block_draft", make_latent_draft(), {})
    assert draft_names(with_block) == ["draft", "block_draft"]
    assert type(load_pair(with_block, draft="block_draft")[1]) is EagleDraft
    save_draft(with_block, "block_draft", make_block_draft(tmp_path / "again", seed=1), {})
    assert type(load_pair(with_block, draft="block_draft")[1]) is DFlash


def test_a_new_pair_has_no_block_draft(with_block):
    save_pair(with_block, *make_pair(seed=1), {})
    assert draft_names(with_block) == ["draft"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_block_draft_without_one_of_its_files_is_named(with_block, name):
    (with_block / "block_draft" / name).unlink()
    assert str(with_block / "block_draft") in refusal(with_block, "block_draft")
    load_pair(with_block)


def test_a_block_draft_of_another_target_is_refused(folder, tmp_path):
    before, wide = files(folder), make_pair(make_config(hidden_size=64))[0]
    with pytest.raises(CheckpointError, match="shares its target's hidden_size"):
        save_draft(folder, "wide", make_block_draft(tmp_path / "wide", wide), {})
    assert files(folder) == before


def test_a_block_draft_of_states_that_no_pairs_target_returns_is_refused(with_block):
    save_pair(with_block, *make_pair(make_config(num_layers=2)), {})
    path = with_block / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"block_draft": None}))
    said = refusal(with_block, "block_draft")
    assert "its last layer, 1, and target_layer_ids" in said and "asks for [0]" in said


@pytest.mark.parametrize("name", ["target", "draft"])
def test_a_pair_has_a_target_and_a_draft_of_its_own(folder, name):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: None}))
    assert str(folder) in refusal(folder)


def test_a_draft_in_8_bits_is_not_written_without_its_weights(folder, tmp_path):
    target, draft = (model.bfloat16() for model in make_pair())
    block = make_block_draft(tmp_path / "published", target)
    for each in (draft, block):
        quantise_draft(each)
        before = sorted(path.name for path in tmp_path.rglob("*"))
        with pytest.raises(CheckpointError, match=r"in 8 bits.* Save it before quantise_draft"):
            save_draft(folder, "another", each, {})
        with pytest.raises(CheckpointError, match="in 8 bits"):
            save_pair(tmp_path / "new", target, each, {})
        assert sorted(path.name for path in tmp_path.rglob("*")) == before
