"""Checkpoints that lie: each is rejected with a message that names the lie, before memory is allocated."""

import json
import math
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_decode.llm.load import is_pair
from spec_decode.models import CheckpointError, load_pair, save_pair
from spec_decode.models.checkpoints.store import TensorStore
from spec_decode.models.load import load_draft
from tests.factories import make_pair
from tests.spec_decode.models.generated import Generated, StubTarget, duplicate_name
from tests.spec_decode.models.test_published_drafts import EVERY

FALSE_SIZES = [10**12, 2**63, 10**400, 2**30, -1, 1.5, True, "7", math.nan, math.inf, [], {}]
SIZES = {
    "eagle": "hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size",
    "eagle3": "draft_vocab_size num_key_value_heads intermediate_size num_hidden_layers",
    "latent_eagle3": "draft_vocab_size kv_lora_rank v_head_dim intermediate_size num_attention_heads",
    "dflash2": "block_size conv_kernel_size conv_group_size selector_rank selector_top_k",
    "llama": "hidden_size intermediate_size num_hidden_layers max_position_embeddings",
    "deepseek_v3": "n_routed_experts moe_intermediate_size kv_lora_rank max_position_embeddings v_head_dim",
    "qwen_of_experts": "num_experts moe_intermediate_size head_dim shared_expert_intermediate_size hidden_size",
    "deepseek_v4": "n_routed_experts hc_mult head_dim q_lora_rank o_lora_rank",
}


def refusal(read):
    with pytest.raises(CheckpointError, match=r"\. [A-Z]\w+ [^.]*(\.\w+)?[^.]*\.$") as refused:
        read()
    return str(refused.value)


def load_refusal(folder, kind, checkpoint=None):
    case = EVERY[kind]
    target = StubTarget(**case.target)
    (checkpoint or case.checkpoint).write(folder)
    return refusal(lambda: load_draft(folder, target, dtype=torch.float32))


@pytest.mark.parametrize(("kind", "field"), [(kind, name) for kind, names in SIZES.items() for name in names.split()])
def test_config_with_false_size_is_rejected(tmp_path, kind, field):
    """The lie that is not refused is left in config.json."""
    checkpoint, target = EVERY[kind].checkpoint, StubTarget(**EVERY[kind].target)
    folder = checkpoint.write(tmp_path)
    for lie in FALSE_SIZES:
        (folder / "config.json").write_text(json.dumps({**checkpoint.config, field: lie}))
        refusal(lambda: load_draft(folder, target, dtype=torch.float32))


@pytest.mark.parametrize("lie", [10**400, -1.0, 0, math.nan, math.inf, -math.inf, True, "7"], ids=repr)
@pytest.mark.parametrize("kind", ["llama", "latent_eagle3", "deepseek_v3", "deepseek_v4", "mimo"])
def test_invalid_number_is_rejected_by_name(tmp_path, kind, lie):
    for field in ("rms_norm_eps", "rope_theta", *["hc_eps"] * (kind == "deepseek_v4")):
        message = load_refusal(tmp_path, kind, EVERY[kind].checkpoint.changed({field: lie}))
        assert field.removeprefix("rms_") in message


CONFIGS = {
    "said twice": (b'{"a": 1, "a": 2}', "a is duplicated"),
    "said twice inside": (b'{"a": {"b": 1, "c": 0, "b": 1}}', ": b is duplicated"),
    "nested deeply": (b"[" * 200_000, "is not valid JSON"),
    "objects nested deeply": (b'{"a":' * 200_000, "is not valid JSON"),
    "a number of many digits": (b'{"a": %s}' % (b"9" * 5000), "is not valid JSON"),
    "not utf-8": (b'{"a": "\xff"}', "is not valid JSON"),
    "NaN that nothing reads": (b'{"a": {"b": NaN}}', "b is NaN. Restore"),
}


@pytest.mark.parametrize(("text", "problem"), CONFIGS.values(), ids=CONFIGS)
def test_malformed_config_is_rejected(tmp_path, text, problem):
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(text)
    assert problem in refusal(lambda: TensorStore.open(tmp_path)) and problem in refusal(lambda: load_pair(tmp_path))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_draft_config_may_start_with_byte_order_mark(tmp_path, encoding):
    path = EVERY["llama"].checkpoint.write(tmp_path) / "config.json"
    path.write_bytes(path.read_text().encode(encoding))
    load_draft(tmp_path, StubTarget(), dtype=torch.float32)


def entry(**changes):
    return {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | changes


HEADERS = {
    "offsets beyond the file": {"a": entry(data_offsets=[0, 2**40])},
    "negative offsets": {"a": entry(data_offsets=[-16, 0])},
    "offsets in the wrong order": {"a": entry(data_offsets=[16, 0])},
    "tensors that overlap": {
        "a": entry(shape=[2], data_offsets=[0, 8]), "b": entry(shape=[2], data_offsets=[4, 12])
    },
    "a hole before a tensor": {"a": entry(shape=[2], data_offsets=[8, 16])},
    "a shape of more than its bytes": {"a": entry(shape=[2**20, 2**20])},
    "a shape beyond 64 bits": {"a": entry(shape=[2**40, 2**40])},
    "a negative shape": {"a": entry(shape=[-2, -2])},
    "a dtype of other bytes": {"a": entry(dtype="F64")},
    "an unknown dtype": {"a": entry(dtype="Q9")},
}  # fmt: skip


def header_refusal(folder, header, length=None):
    (folder / "config.json").write_text("{}")
    length = len(header) if length is None else length
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + header + bytes(16))
    return refusal(lambda: TensorStore.open(folder))


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_false_safetensors_header_is_rejected(tmp_path, header):
    message = header_refusal(tmp_path, json.dumps(header).encode())
    assert "model.safetensors cannot be read as safetensors" in message


@pytest.mark.parametrize("length", [0, 2**32, 2**62, 2**64 - 1])
def test_header_of_wrong_length_is_rejected(tmp_path, length):
    header_refusal(tmp_path, json.dumps({"a": entry()}).encode(), length)


def test_header_with_duplicate_name_is_rejected(tmp_path):
    twice = b'{"a": %s, "a": %s}' % (json.dumps(entry()).encode(), json.dumps(entry(shape=[4])).encode())
    assert "a is duplicated in one object" in header_refusal(tmp_path, twice)


@pytest.fixture
def pair(tmp_path):
    save_pair(tmp_path, *make_pair(), {})
    return tmp_path


def test_pair_weights_with_duplicate_name_are_rejected(pair):
    name = duplicate_name(pair / "target.safetensors")
    assert f"{name} is duplicated in one object" in refusal(lambda: load_pair(pair))


@pytest.mark.parametrize(
    ("load", "name"),
    [(TensorStore.open, "config.json"), (load_pair, "config.json"), (load_pair, "draft.safetensors")],
)
def test_pipe_is_rejected_without_reading(pair, pipe, load, name):
    pipe(pair / name)
    assert "it is a pipe or a device, not a file" in refusal(lambda: load(pair))


def test_is_pair_does_not_wait_for_pipe(pair, pipe):
    assert is_pair(pair)
    pipe(pair / "config.json", b'{"target": {}}')
    assert not is_pair(pair)


PLACES = ["../x.safetensors", "/etc/passwd", "a/../../b", "..", "", "a\0b", "\ud800", "x" * 5000]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: ascii(place[:20]))
def test_index_outside_folder_or_without_file_is_rejected(tmp_path, place):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": place}}))
    message = refusal(lambda: TensorStore.open(tmp_path))
    assert len(message) < 1000 and ("names 1 files, 1 of them missing: xxx" in message) is place.startswith("x")


def test_shard_may_be_a_link(tmp_path):
    (tmp_path / "blobs").mkdir()
    checkpoint = Generated({}, {"a": torch.ones(2), "b": torch.ones(1)})
    folder = checkpoint.write(tmp_path / "snapshot", "model.safetensors.index.json")
    for number, path in enumerate(sorted(folder.glob("*.safetensors"))):
        path.rename(tmp_path / "blobs" / str(number))
        path.symlink_to(tmp_path / "blobs" / str(number))
    assert TensorStore.open(folder).take("a", (2,)).tolist() == [1, 1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_non_finite_weights_are_rejected_by_name(tmp_path, dtype, value):
    plain = EVERY["eagle"].checkpoint
    weight = plain.tensors["fc.weight"].to(dtype, copy=True)
    weight[3, 5] = value
    message = load_refusal(tmp_path, "eagle", plain.changed(tensors={"fc.weight": weight}))
    assert message.startswith("fc.weight in ") and "must hold finite numbers" in message


def test_non_finite_pair_weights_are_rejected_by_name(pair):
    state = load_file(pair / "target.safetensors")
    state["norm.weight"][0] = math.nan
    save_file(state, pair / "target.safetensors")
    path = pair / "target.safetensors"
    assert f"norm.weight in {path} must hold finite numbers" in refusal(lambda: load_pair(pair))


@pytest.mark.parametrize("make", [lambda x: x.to_sparse(), lambda x: x.to("meta")], ids=["sparse", "meta"])
def test_bin_file_without_plain_tensor_data_is_rejected(tmp_path, make):
    Generated({}, {"a": make(torch.eye(2))}).write(tmp_path, "pytorch_model.bin")
    refusal(lambda: TensorStore.open(tmp_path))


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_layers", "num_q_heads", "max_positions"])
def test_pair_config_with_false_size_is_rejected(pair, field):
    """The lie that is not refused is left in config.json."""
    configs = json.loads((pair / "config.json").read_text())
    for lie in FALSE_SIZES:
        lying = {name: {**config, field: lie} for name, config in configs.items()}
        (pair / "config.json").write_text(json.dumps(lying))
        refusal(lambda: load_pair(pair))


@pytest.mark.parametrize("kind", [*SIZES, "dflash", "dspark", "deepseek_v3_of_modules"])
def test_quantised_checkpoint_of_any_kind_is_rejected(tmp_path, kind):
    quantised = EVERY[kind].checkpoint.changed({"quantization_config": {"quant_method": "gptq"}})
    message = load_refusal(tmp_path, kind, quantised)
    assert "has method 'gptq'; integers of few bits are not read" in message


def test_value_too_large_for_dtype_is_rejected(tmp_path):
    Generated({}, {"a": torch.tensor([1.0, -1e6])}).write(tmp_path)
    message = refusal(lambda: TensorStore.open(tmp_path).take("a", (2,), torch.float16))
    assert "a in" in message and "must fit in torch.float16, got a value of 1e+06" in message
    assert TensorStore.open(tmp_path).take("a", (2,), torch.bfloat16).isfinite().all()
