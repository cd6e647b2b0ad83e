"""A folder's own code is never run, nobody is asked whether it may be, and its files are not believed."""

import json
import math
import struct
from functools import partial

import pytest

from spec_decode import models
from spec_decode.models import CheckpointError

transformers = pytest.importorskip("transformers")

from spec_decode.models.hf.folder import load_model, load_tokenizer  # noqa: E402

CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizer
class Config(LlamaConfig):
    model_type = "of_its_own"
class Model(LlamaForCausalLM):
    config_class = Config
class Tokenizer(PreTrainedTokenizer):
    pass
"""
SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 16,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A saved model whose configs name classes of a module beside them; whoever reads stdin fails."""

    def ask(*_):
        pytest.fail("somebody was asked")

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr("sys.stdin", None)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    (tmp_path / "its_own.py").write_text(CODE)
    return tmp_path


def change(path, **fields):
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(found | fields))


MODEL = {"AutoConfig": "its_own.Config", "AutoModelForCausalLM": "its_own.Model"}


def test_a_model_that_only_its_own_code_knows_is_refused(folder):
    change(folder / "config.json", model_type="of_its_own", auto_map=MODEL)
    with pytest.raises(CheckpointError, match=r"auto_map to code beside it, which is never run\."):
        load_model(folder, dtype=None)
    assert not (folder / "ran").exists()


def test_a_model_that_the_library_knows_loads_without_its_own_code(folder):
    change(folder / "config.json", auto_map=MODEL)
    assert type(load_model(folder, dtype=None)) is transformers.LlamaForCausalLM
    assert not (folder / "ran").exists()


def test_a_tokenizer_that_only_its_own_code_knows_is_refused(folder):
    change(folder / "config.json", model_type="of_its_own", auto_map=MODEL)
    own = {"AutoTokenizer": ["its_own.Tokenizer", None]}
    change(folder / "tokenizer_config.json", tokenizer_class="Tokenizer", auto_map=own)
    with pytest.raises(CheckpointError, match=r"auto_map to code beside it, which is never run\."):
        load_tokenizer(folder)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_no_numbers_make_no_target(folder, value):
    model = load_model(folder, dtype=None)
    # Far from the tokens that a target is tried on.
    model.model.embed_tokens.weight.data[-1, 3] = value

    named = r"NaN or infinity in 1 of them, model\.embed_tokens\.weight first; .* no target was made"
    with pytest.raises(CheckpointError, match=named):
        models.TransformersTarget(model)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("load", [load_tokenizer, partial(load_model, dtype=None)], ids=["tokenizer", "model"])
def test_a_byte_order_mark_is_named_and_nothing_else_is_blamed(folder, load, name, encoding):
    change(folder / "tokenizer_config.json")
    (folder / name).write_bytes((folder / name).read_text().encode(encoding))
    with pytest.raises(CheckpointError, match=f"{name} must be utf-8 without a byte order mark, it is utf"):
        load(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("load", [load_tokenizer, partial(load_model, dtype=None)], ids=["tokenizer", "model"])
def test_nan_is_named_with_its_field_and_nothing_else_is_blamed(folder, load, name):
    change(folder / "tokenizer_config.json")
    change(folder / name, rms_norm_eps=math.nan)
    with pytest.raises(CheckpointError, match=f"{name} must hold JSON: rms_norm_eps is NaN"):
        load(folder)


def test_a_limit_of_infinity_is_none_to_refuse(folder):
    change(folder / "config.json", time_step_limit=[0.0, math.inf], a_limit=math.inf)
    load_model(folder, dtype=None)


def test_a_header_that_says_a_name_twice_is_refused(folder):
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    name, entry = next(item for item in json.loads(raw[8 : 8 + length]).items() if item[0] != "__metadata__")
    header = raw[8 : 8 + length].rstrip().removesuffix(b"}") + f", {json.dumps(name)}: {json.dumps(entry)}}}".encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])
    with pytest.raises(CheckpointError, match=f"{name} is said twice"):
        load_model(folder, dtype=None)


@pytest.mark.parametrize(("name", "load"), [("generation_config.json", load_model), ("tokenizer.json", load_tokenizer)])
def test_a_folder_that_holds_a_pipe_is_refused_before_the_library_waits_for_it(folder, pipe, name, load):
    change(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    pipe(folder / name)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read: it is a pipe or a device"):
        load(folder) if load is load_tokenizer else load(folder, dtype=None)
