import json

import pytest
import torch

from spec_decode.models import CheckpointError
from spec_decode.models.checkpoints.store import TensorStore
from tests.spec_decode.models.generated import FORMS, Generated, make_eagle, save


@pytest.fixture
def checkpoint():
    return make_eagle(fc_bias=True)


def refusal(read):
    with pytest.raises(CheckpointError) as refused:
        read()
    return str(refused.value)


def first_shard(folder):
    return next(path for path in sorted(folder.iterdir()) if "00001-of" in path.name)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_holds_the_same_tensors(checkpoint, tmp_path, form):
    store = TensorStore.open(checkpoint.write(tmp_path, form))
    assert store.config.values == checkpoint.config and store.names() == checkpoint.tensors.keys()
    for name, tensor in checkpoint.tensors.items():
        assert torch.equal(store.take(name, tuple(tensor.shape)), tensor)


def test_a_bin_file_from_before_the_zip_format_is_read(checkpoint, tmp_path):
    checkpoint.write(tmp_path, "pytorch_model.bin")
    torch.save(checkpoint.tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    store = TensorStore.open(tmp_path)
    assert torch.equal(store.take("fc.bias", (32,)), checkpoint.tensors["fc.bias"])


def test_safetensors_come_before_bin(checkpoint, tmp_path):
    checkpoint.write(tmp_path, "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"none of it is read")
    assert TensorStore.open(tmp_path).names() == checkpoint.tensors.keys()


@pytest.mark.parametrize("form", FORMS[::2])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
def test_a_tensor_is_cast_to_the_dtype_asked_for(checkpoint, tmp_path, form, dtype):
    taken = TensorStore.open(checkpoint.write(tmp_path, form)).take("fc.bias", (32,), dtype)
    assert torch.equal(taken, checkpoint.tensors["fc.bias"].to(dtype or torch.float32)) and taken.dtype == (
        dtype or torch.float32
    )


@pytest.mark.parametrize("form", FORMS[::2])
def test_a_tensor_outlives_its_file(checkpoint, tmp_path, form):
    store = TensorStore.open(checkpoint.write(tmp_path, form))
    taken = store.take("fc.weight", (32, 64))
    path = tmp_path / form
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(taken, checkpoint.tensors["fc.weight"])


def test_tensors_that_nobody_took_are_refused(tmp_path):
    store = TensorStore.open(Generated({}, {name: torch.ones(2) for name in ("c", "a", "b")}).write(tmp_path))
    store.take("b", (2,))
    message = refusal(store.refuse_unused)
    assert "holds 2 tensors that this model has no place for: a, c;" in message
    assert message.endswith("Use a model without such tensors; if config.json is another model's, restore it.")


def test_unused_tensors_are_refused_by_name_but_for_the_ignorable(tmp_path):
    names = [*(f"extra{i}" for i in range(10)), "known", "layers.0.self_attn.rotary_emb.inv_freq"]
    store = TensorStore.open(Generated({}, {name: torch.ones(2) for name in names}).write(tmp_path))
    message = refusal(lambda: store.refuse_unused(["known"]))
    assert "10 tensors that this model has no place for: extra0, extra1" in message and "extra9" not in message
    assert "known" not in message and "inv_freq" not in message


def test_a_checkpoint_used_up_is_not_refused(tmp_path):
    store = TensorStore.open(Generated({}, {"a": torch.ones(2)}).write(tmp_path))
    store.take("a", (2,))
    store.refuse_unused()


def test_a_missing_config_is_named(tmp_path):
    message = refusal(lambda: TensorStore.open(tmp_path / "nowhere"))
    assert f"{tmp_path / 'nowhere' / 'config.json'}, which cannot be read: No such file" in message


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "3", "\xff\xfe"])
def test_a_config_that_is_no_object_is_named(checkpoint, tmp_path, text):
    checkpoint.write(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("latin1"))
    assert f"{tmp_path / 'config.json'} must hold" in refusal(lambda: TensorStore.open(tmp_path))


def test_a_folder_without_weights_says_what_was_looked_for(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    message = refusal(lambda: TensorStore.open(tmp_path))
    assert f"{tmp_path} holds none of them" in message and all(form in message for form in FORMS)


@pytest.mark.parametrize("form", FORMS[1::2])
def test_an_index_that_names_a_missing_shard_is_refused_with_it(checkpoint, tmp_path, form):
    checkpoint.write(tmp_path, form)
    shard = first_shard(tmp_path)
    shard.unlink()
    message = refusal(lambda: TensorStore.open(tmp_path))
    assert f"{tmp_path / form} names 2 files, 1 of them missing: {shard.name}" in message


@pytest.mark.parametrize(
    ("places", "said"),
    [
        (None, "must hold a weight_map"),
        ([], "must hold a weight_map"),
        ({"a": 3}, "must hold a weight_map"),
        ({"a": "../other/model.safetensors"}, "must name files beside it"),
    ],
)
def test_an_index_without_a_usable_map_is_refused(tmp_path, places, said):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / FORMS[1]).write_text(json.dumps({"weight_map": places}))
    message = refusal(lambda: TensorStore.open(tmp_path))
    assert str(tmp_path / FORMS[1]) in message and said in message


def test_a_tensor_that_is_not_in_the_shard_of_its_index_is_named_with_both(checkpoint, tmp_path):
    checkpoint.write(tmp_path, FORMS[1])
    shard = first_shard(tmp_path)
    save(shard, {"other": torch.ones(2)})
    message = refusal(lambda: TensorStore.open(tmp_path).take("fc.weight", (32, 64)))
    assert f"places fc.weight in {shard.name}, which does not hold it" in message


@pytest.mark.parametrize("kept", [0, 4, 200, -1])
@pytest.mark.parametrize("form", FORMS)
def test_a_truncated_file_is_named(checkpoint, tmp_path, form, kept):
    checkpoint.write(tmp_path, form)
    path = first_shard(tmp_path) if "index" in form else tmp_path / form
    path.write_bytes(path.read_bytes()[:kept])
    message = refusal(lambda: TensorStore.open(tmp_path).take("fc.weight", (32, 64)))
    assert f"{path} cannot be read as" in message and "truncated or corrupt" in message


def test_a_bin_file_with_code_in_it_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    torch.save({"a": print}, tmp_path / "pytorch_model.bin")
    assert "cannot be read as a PyTorch state" in refusal(lambda: TensorStore.open(tmp_path))


@pytest.mark.parametrize("state", [[torch.ones(2)], {"a": 3}])
def test_a_bin_file_that_holds_no_state_is_refused(tmp_path, state):
    (tmp_path / "config.json").write_text("{}")
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert "must hold tensors by name" in refusal(lambda: TensorStore.open(tmp_path))


def test_a_missing_tensor_is_named(checkpoint, tmp_path):
    store = TensorStore.open(checkpoint.write(tmp_path))
    assert f"{tmp_path} must hold a tensor norm.weight" in refusal(lambda: store.take("norm.weight", (32,)))


def test_a_tensor_of_another_shape_is_named_with_both_shapes(checkpoint, tmp_path):
    store = TensorStore.open(checkpoint.write(tmp_path))
    message = refusal(lambda: store.take("fc.weight", (32, 96)))
    assert f"fc.weight in {tmp_path / 'model.safetensors'} must be [32, 96], got [32, 64]" in message


@pytest.mark.parametrize(
    ("stored", "asked", "said"),
    [
        (torch.int8, torch.float32, "floats of 16 bits or more, got torch.int8"),
        (torch.float8_e4m3fn, torch.bfloat16, "floats of 16 bits or more, got torch.float8_e4m3fn"),
        (torch.float32, torch.int64, "integers, got torch.float32"),
    ],
)
def test_quantised_weights_are_not_taken_for_plain_ones(tmp_path, stored, asked, said):
    store = TensorStore.open(Generated({}, {"a": torch.ones(2).to(stored)}).write(tmp_path))
    assert f"a in {tmp_path / 'model.safetensors'} must be stored as {said}" in refusal(
        lambda: store.take("a", (2,), asked)
    )


def test_a_refused_tensor_stays_unused(checkpoint, tmp_path):
    store = TensorStore.open(checkpoint.write(tmp_path))
    refusal(lambda: store.take("fc.weight", (1,)))
    assert "fc.weight" in refusal(store.refuse_unused)
