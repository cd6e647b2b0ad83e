import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.random_model import timed_load
from spec_decode.models import CheckpointError
from spec_decode.models.checkpoints import store as stores
from spec_decode.models.checkpoints.files import is_finite
from spec_decode.models.checkpoints.store import ScopedWeights, TensorStore, check_weights
from spec_decode.testing.memory import read
from tests.factories import CPU
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
    assert "; the first is in model.safetensors. " in message
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
    (tmp_path / "model-q4.gguf").touch()
    assert "only model-q4.gguf; GGUF is not read" in refusal(lambda: TensorStore.open(tmp_path))


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


@pytest.mark.parametrize("form", FORMS[1::2])
def test_tensor_in_two_shards_is_refused(tmp_path, form):
    first, second = sorted(path for path in CHECKPOINT.write(tmp_path, form).iterdir() if "-of-" in path.name)
    name, tensor = next(iter(CHECKPOINT.tensors.items()))
    save(second, {name: tensor + 1})
    for load in (TensorStore.open, check_weights):
        assert f"{name} is in both {first} and {second.name}" in refusal(lambda load=load: load(tmp_path))


@pytest.mark.parametrize("form", FORMS[1::2])
def test_tensor_that_the_index_leaves_out_is_read(tmp_path, form):
    index = CHECKPOINT.write(tmp_path, form) / form
    shard = json.loads(index.read_text())["weight_map"]
    place = shard.pop("fc.bias")
    index.write_text(json.dumps({"weight_map": shard}))
    store = TensorStore.open(tmp_path)
    for name, tensor in CHECKPOINT.tensors.items():
        if name != "fc.bias":
            store.take(name, tuple(tensor.shape))
    assert f"1 unexpected tensors: fc.bias; the first is in {place}" in refusal(store.refuse_unused)
    assert torch.equal(store.take("fc.bias", (32,)), CHECKPOINT.tensors["fc.bias"])


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


def mapped(path):
    """Whether the file is mapped into this process."""
    return str(path) in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("form", FORMS)
def test_file_is_closed_after_its_last_tensor(tmp_path, form):
    store, told = TensorStore.open(CHECKPOINT.write(tmp_path, form)), []
    store.on_read = told.append
    shards = sorted(path for path in tmp_path.iterdir() if path.suffix in (".safetensors", ".bin"))
    seen = []
    for name, tensor in sorted(CHECKPOINT.tensors.items(), key=lambda named: store.place(named[0])):
        store.take(name, tuple(tensor.shape))
        seen.append([mapped(shard) for shard in shards])
    assert not any(seen[-1]) and len({tuple(each) for each in seen}) == len(shards) + 1
    assert told and sum(told) == sum(tensor.nbytes for tensor in CHECKPOINT.tensors.values()) < store.num_bytes
    # A further read opens it again.
    assert torch.equal(store.take("fc.bias", (32,)), CHECKPOINT.tensors["fc.bias"])
    assert not any(map(mapped, shards))


@pytest.mark.parametrize("form", FORMS[:2])
def test_places_follow_the_bytes_of_each_file(tmp_path, form):
    store = TensorStore.open(CHECKPOINT.write(tmp_path, form))
    in_order = []
    for path in sorted(tmp_path.glob("*.safetensors")):
        length = int.from_bytes(path.read_bytes()[:8], "little")
        header = json.loads(path.read_bytes()[8 : 8 + length])
        in_order += sorted(header.keys() - {"__metadata__"}, key=lambda name: header[name]["data_offsets"])
    assert sorted(sorted(in_order), key=store.place) == in_order
    assert store.place("absent") > max(map(store.place, in_order))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_stacking_holds_each_number_once(tmp_path, stored, monkeypatch):
    """Besides the stack, one tensor of the file at a time; and a sum of 16-bit numbers makes no copy of them."""
    monkeypatch.setattr(stores, "_MAPPED", 1 << 20)
    rows, names = [2048] * 4, "abcd"
    parts = {name: torch.full((2048, 4096), float(index), dtype=stored) for index, name in enumerate(names)}
    store = store_of(tmp_path, **parts)
    weights, stacked = ScopedWeights(store, "", stored, CPU), []

    def load():
        stacked.append(weights.stacked(names, rows, 4096))
        return nn.Identity()

    before = read(CPU).resident
    _, found = timed_load(load, CPU)
    size = parts["a"].nbytes
    assert torch.equal(stacked[0], torch.cat([*parts.values()]))
    if found.host_peak is not None:
        assert found.host_peak - before < (4 + 1 + 0.5) * size


def test_misshapen_part_of_a_stack_is_found_before_memory_is_taken(tmp_path, monkeypatch):
    store = store_of(tmp_path, a=torch.ones(2, 4), b=torch.ones(3, 4))
    monkeypatch.setattr(torch, "empty", None)
    message = refusal(lambda: ScopedWeights(store, "", torch.float32, CPU).stacked("ab", [2, 1 << 40], 4))
    assert "b in " in message and "must be [1099511627776, 4], got [3, 4]" in message


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_number_that_is_not_finite_is_found(dtype, value):
    numbers = torch.full((300, 70), torch.finfo(dtype).max / 2, dtype=dtype)
    assert is_finite(numbers) and is_finite(numbers[:0]) and is_finite(torch.ones(3, dtype=torch.int8))
    for row, column in ((0, 0), (299, 69), (150, 33)):
        changed = numbers.clone()
        changed[row, column] = value
        assert not is_finite(changed) and not is_finite(changed.T)
