import json
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_decode.models import CheckpointError, EagleDraft, LlamaTarget, load_pair, save_pair
from tests.factories import make_config, make_pair


@pytest.fixture
def folder(tmp_path):
    save_pair(tmp_path / "pair", *make_pair(), {"steps": 3})
    return tmp_path / "pair"


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


def refusal(folder):
    with pytest.raises(CheckpointError) as refused:
        load_pair(folder)
    return str(refused.value)


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
