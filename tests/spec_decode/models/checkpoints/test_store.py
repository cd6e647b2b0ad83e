import json

import pytest
import torch

from spec_decode.models import CheckpointError
from spec_decode.models.checkpoints.store import TensorStore
from tests.spec_decode.models.generated import FORMS, Generated, make_eagle, save

CHECKPOINT = make_eagle(fc_bias=True)


def refusal(read):
    with pytest.raises(CheckpointError) as refused:
        read()
    return str(refused.value)


def store_of(folder, **tensors):
    return TensorStore.open(Generated({}, tensors).write(folder))


def first_shard(folder):
    return next(path for path in sorted(folder.iterdir()) if "00001-of" in path.name)


@pytest.mark.parametrize("form", FORMS)
def test_every_format_contains_same_tensors(tmp_path, form):
    store = TensorStore.open(CHECKPOINT.write(tmp_path, form))
    assert store.config.values == CHECKPOINT.config and store.names() == CHECKPOINT.tensors.keys()
    for name, tensor in CHECKPOINT.tensors.items():
        assert torch.equal(store.take(name, tuple(tensor.shape)), tensor)


def test_old_bin_format_is_read(tmp_path):
    CHECKPOINT.write(tmp_path, "pytorch_model.bin")
    torch.save(CHECKPOINT.tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(TensorStore.open(tmp_path).take("fc.bias", (32,)), CHECKPOINT.tensors["fc.bias"])


def test_safetensors_are_preferred_over_bin(tmp_path):
    CHECKPOINT.write(tmp_path, "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"none of it is read")
    assert TensorStore.open(tmp_path).names() == CHECKPOINT.tensors.keys()


@pytest.mark.parametrize("form", FORMS[::2])
def test_tensor_is_cast_and_outlives_its_file(tmp_path, form):
    store, path = TensorStore.open(CHECKPOINT.write(tmp_path, form)), tmp_path / form
    taken = {dtype: store.take("fc.bias", (32,), dtype) for dtype in (None, torch.bfloat16, torch.float64)}
    path.write_bytes(bytes(path.stat().st_size))
    for requested, tensor in taken.items():
        wanted = CHECKPOINT.tensors["fc.bias"].to(requested or torch.float32)
        assert tensor.dtype == wanted.dtype and torch.equal(tensor, wanted)


def test_unused_tensors_are_rejected_except_rotary_tables(tmp_path):
    names = ["b", *(f"extra{i}" for i in range(10)), "layers.0.self_attn.rotary_emb.inv_freq"]
    store = store_of(tmp_path, **{name: torch.ones(2) for name in names})
    store.take("b", (2,))
    message = refusal(lambda: store.refuse_unused())
    assert "has 10 unexpected tensors: extra0, extra1" in message and "extra9" not in message
    assert "inv_freq" not in message
    assert message.endswith("Use a model without them, or restore config.json if it is another model's.")
    for index in range(10):
        store.take(f"extra{index}", (2,))
    store.refuse_unused()


def test_a_missing_config_is_named(tmp_path):
    message = refusal(lambda: TensorStore.open(tmp_path / "nowhere"))
    assert f"{tmp_path / 'nowhere' / 'config.json'} cannot be read: No such file" in message


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        *((text, "is not valid JSON") for text in ("", "{", "\xff\xfe")),
        *((text, "must hold a JSON object") for text in ("[1, 2]", "3")),
    ],
)
def test_config_that_is_no_object_is_named(tmp_path, text, problem):
    CHECKPOINT.write(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("latin1"))
    assert f"{tmp_path / 'config.json'} {problem}" in refusal(lambda: TensorStore.open(tmp_path))


def test_folder_without_weights_lists_accepted_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    message = refusal(lambda: TensorStore.open(tmp_path))
    assert f"{tmp_path} has no weights (" in message and all(form in message for form in FORMS)


@pytest.mark.parametrize("form", FORMS[1::2])
def test_index_with_missing_shard_is_rejected(tmp_path, form):
    shard = first_shard(CHECKPOINT.write(tmp_path, form))
    shard.unlink()
    message = refusal(lambda: TensorStore.open(tmp_path))
    assert f"{tmp_path / form} names 2 files, 1 of them missing: {shard.name}" in message


@pytest.mark.parametrize("places", [None, [], {"a": 3}, {"a": "../other/model.safetensors"}])
def test_index_without_usable_map_is_rejected(tmp_path, places):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / FORMS[1]).write_text(json.dumps({"weight_map": places}))
    message = refusal(lambda: TensorStore.open(tmp_path))
    rule = "must name files in its folder" if "other" in str(places) else "must hold a weight_map"
    assert str(tmp_path / FORMS[1]) in message and rule in message


def test_tensor_missing_from_its_shard_is_named(tmp_path):
    shard = first_shard(CHECKPOINT.write(tmp_path, FORMS[1]))
    save(shard, {"other": torch.ones(2)})
    message = refusal(lambda: TensorStore.open(tmp_path).take("fc.weight", (32, 64)))
    assert f"maps fc.weight to {shard.name}, which does not contain it" in message


@pytest.mark.parametrize("form", FORMS)
def test_a_truncated_file_is_named(tmp_path, form):
    CHECKPOINT.write(tmp_path, form)
    path = first_shard(tmp_path) if "index" in form else tmp_path / form
    for kept in (-1, 200, 4, 0):
        path.write_bytes(path.read_bytes()[:kept])
        message = refusal(lambda: TensorStore.open(tmp_path).take("fc.weight", (32, 64)))
        assert f"{path} cannot be read as" in message and "truncated or corrupt" in message


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"a": print}, "cannot be read as a PyTorch state"),
        ([torch.ones(2)], "must hold a state_dict of dense tensors"),
        ({"a": 3}, "must hold a state_dict of dense tensors"),
    ],
)
def test_bin_file_must_be_a_plain_state(tmp_path, state, problem):
    (tmp_path / "config.json").write_text("{}")
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert problem in refusal(lambda: TensorStore.open(tmp_path))


def test_missing_or_misshapen_tensor_is_named(tmp_path):
    store = TensorStore.open(CHECKPOINT.write(tmp_path))
    assert f"{tmp_path} lacks the tensor norm.weight" in refusal(lambda: store.take("norm.weight", (32,)))
    message = refusal(lambda: store.take("fc.weight", (32, 96)))
    assert f"fc.weight in {tmp_path / 'model.safetensors'} must be [32, 96], got [32, 64]" in message
    assert "fc.weight" in refusal(store.refuse_unused)


@pytest.mark.parametrize(
    ("stored", "dtype", "wanted"),
    [
        (torch.int8, torch.float32, "floats of at least 16 bits, got torch.int8"),
        (torch.float8_e4m3fn, torch.bfloat16, "floats of at least 16 bits, got torch.float8_e4m3fn"),
        (torch.float32, torch.int64, "integers, got torch.float32"),
        (torch.complex64, torch.int64, "integers, got torch.complex64"),
    ],
)
def test_quantised_weights_are_rejected_as_plain(tmp_path, stored, dtype, wanted):
    store = store_of(tmp_path, a=torch.ones(2).to(stored))
    message = refusal(lambda: store.take("a", (2,), dtype))
    assert f"a in {tmp_path / 'model.safetensors'} must be stored as {wanted}" in message


def test_a_state_without_names_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    torch.save({0: torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError, match=r"pytorch_model\.bin must hold a state_dict with names as keys, got the key 0"
    ):
        TensorStore.open(tmp_path)
