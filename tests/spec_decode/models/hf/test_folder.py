"""A model and a tokenizer from a folder: its code never runs, no prompt asks to allow it, nothing is downloaded, and
its files are not trusted."""

import json
import math
import re
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from spec_decode import models
from spec_decode.models import CheckpointError
from spec_decode.models.checkpoints.store import TensorStore
from tests.spec_decode.models.generated import duplicate_name

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
LOADERS = {"tokenizer": load_tokenizer, "model": partial(load_model, dtype=torch.float32)}
CONFIGS = ["config.json", "generation_config.json", "tokenizer_config.json"]
MODEL = {"AutoConfig": "its_own.Config", "AutoModelForCausalLM": "its_own.Model"}


@pytest.fixture(scope="module")
def plain():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


@pytest.fixture
def folder(plain, tmp_path, monkeypatch):
    """A saved model with a module of its own beside it; whoever reads stdin fails."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    monkeypatch.setattr("sys.stdin", None)
    plain.save_pretrained(tmp_path)
    (tmp_path / "its_own.py").write_text(CODE)
    change(tmp_path / "tokenizer_config.json")
    yield tmp_path
    assert not (tmp_path / "ran").exists()


def change(path, **fields):
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(found | fields))


def refusal(folder, kind="model"):
    with pytest.raises(CheckpointError) as refused:
        LOADERS[kind](folder)
    return str(refused.value)


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
def test_saved_model_loads_unchanged(folder, plain, safe):
    if not safe:
        (folder / "model.safetensors").unlink()
        torch.save(plain.state_dict(), folder / "pytorch_model.bin")
    loaded = LOADERS["model"](folder)
    state, target = loaded.state_dict(), models.TransformersTarget(loaded)
    assert all(torch.equal(state[name], tensor) for name, tensor in plain.state_dict().items())
    assert target.embed.weight.shape == (32, 16) and (target.vocab_size, target.max_positions) == (32, 16)


def test_loaded_weights_outlive_their_file(folder, plain):
    found = load_model(folder, dtype=torch.float32).state_dict()
    weights = folder / "model.safetensors"
    with weights.open("r+b") as file:
        file.write(bytes(weights.stat().st_size))
    assert all(torch.equal(found[name], tensor) for name, tensor in plain.state_dict().items())


def test_missing_weights_are_refused_by_name(folder, plain):
    state = plain.state_dict()
    del state["model.layers.0.mlp.up_proj.weight"]
    plain.save_pretrained(folder, state_dict=state)
    assert "lack 1 of the model's tensors, as transformers names them: model.layers.0.mlp.up_proj.weight" in refusal(
        folder
    )


OTHERS = {
    "a bias": ("model.layers.0.self_attn.q_proj.bias", {}),
    "a norm": ("model.layers.0.self_attn.q_norm.weight", {}),
    "a scale": ("lm_head.weight_scale", {}),
    "a layer": ("model.layers.1.input_layernorm.weight", {"num_nextn_predict_layers": 0}),
}
ANOTHERS = {
    "a layer that drafts": ("model.layers.1.input_layernorm.weight", {"num_nextn_predict_layers": 1}),
    "another head": ("score.weight", {}),
    "a vision tower": ("model.visual.norm.weight", {}),
    "a scale of a cache of 8 bits": ("model.layers.0.self_attn.k_scale", {}),
    "angles of old checkpoints": ("model.layers.0.self_attn.rotary_emb.inv_freq", {}),
}


def save_with(plain, folder, name, fields):
    plain.save_pretrained(folder, state_dict={**plain.state_dict(), name: torch.ones(16)})
    change(folder / "config.json", **fields)


@pytest.mark.parametrize(("name", "fields"), OTHERS.values(), ids=OTHERS)
def test_unexpected_weights_are_rejected_by_name(folder, plain, name, fields):
    save_with(plain, folder, name, fields)
    assert f"have tensors unexpected by LlamaForCausalLM, 1 in all: {name};" in refusal(folder)


@pytest.mark.parametrize("scales", [{}, {"model.layers.0.mlp.up_proj.weight_scale": torch.tensor(0.5)}], ids=len)
def test_undeclared_quantised_weights_are_rejected(folder, plain, scales):
    """The library casts 8 bits without their scales."""
    narrow = "model.layers.0.mlp.up_proj.weight"
    state = {**plain.state_dict(), narrow: plain.state_dict()[narrow].to(torch.float8_e4m3fn)}
    save_file({**state, **scales}, folder / "model.safetensors", {"format": "pt"})
    assert f"{narrow} in {folder} has torch.float8_e4m3fn, and config.json has no quant" in refusal(folder)
    state[narrow.removesuffix("weight") + "qweight"] = state.pop(narrow).int()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    assert "qweight in " in (message := refusal(folder)) and "has weights of GPTQ or AWQ, and" in message


QUANTISED = {
    "fp8": (
        {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
        "'fp8'; a target in transformers reads none",
    ),
    "bitsandbytes": (
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        "'bitsandbytes'; integers of few bits",
    ),
    "e5m2": ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "'fp8 e5m2'; of FP8 only"),
    "FP8 of a section": (
        {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
        "'fp8'; FP8 is described by quantization_config at the top of config.json only. Move it there, or",
    ),
    "naive": (
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "naive-quantized"}},
        "'compressed-tensors naive-quantized'; of compressed-tensors",
    ),
    "MXFP4 of another model": ({"quantization_config": {"quant_method": "mxfp4"}}, "'mxfp4'; of 4-bit floats only"),
    "AWQ": ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "'awq'; integers of few bits"),
    "modelopt": ({"quantization_config": {"quant_algo": "NVFP4"}}, "'NVFP4'; of 4-bit floats only MXFP4"),
    "no method": ({"quantization_config": {"load_in_8bit": True}}, "load_in_8bit"),
    "a section": (
        {"text_config": {"quantization_config": {"quant_method": "mxfp4"}}},
        "'mxfp4'; of 4-bit floats only MXFP4 is read, as GPT-OSS",
    ),
    "compressed-tensors": (
        {"compression_config": {"quant_method": "compressed-tensors"}},
        "'compressed-tensors'; this format",
    ),
    "int4": (
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}},
        "'compressed-tensors pack-quantized'; integers of few bits",
    ),
    "int8": (
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "int-quantized"}},
        "'compressed-tensors int-quantized'; 8-bit integers",
    ),
    "MLX": ({"quantization": {"group_size": 64, "bits": 4}}, "'4 bits'; integers of few bits"),
}


@pytest.mark.parametrize(("fields", "method"), QUANTISED.values(), ids=QUANTISED)
def test_quantised_model_is_rejected_before_loading(folder, monkeypatch, fields, method):
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", None)
    change(folder / "config.json", **fields)
    message = refusal(folder)
    assert re.search(f"holds quantised weights: .* has method .*{method}.* use a bf16 copy", message, re.I)
    assert len(message.replace(str(folder), "")) < 300


@pytest.mark.parametrize("file", ["hf_quant_config.json", "quantize_config.json", "quant_config.json"])
def test_quantisation_file_rejects_model(folder, file):
    change(folder / file, quantization={"quant_algo": "FP8"})
    assert f"{file} has method 'FP8'" in refusal(folder)


@pytest.mark.xfail(transformers.__version__ < "5", reason="transformers 4 cannot read it", strict=True)
def test_null_quantisation_is_accepted(folder):
    change(folder / "config.json", quantization_config=None, quantization={})
    LOADERS["model"](folder)


OTHER_TASKS = {
    "vision": ({"model_type": "mistral3", "architectures": ["M3"], "vision_config": {}}, "M3 .*, a multimodal model"),
    "a new kind": ({"model_type": "x_vl", "vision_config": {}}, "a x_vl model .*, a multimodal model"),
    "sound": ({"model_type": "voxtral", "audio_config": {}}, "a voxtral model .*, a multimodal model"),
    "encoder and decoder": ({"model_type": "t5", "architectures": ["T5"]}, "T5 .*, no causal language model"),
}


@pytest.mark.parametrize(("fields", "task"), OTHER_TASKS.values(), ids=OTHER_TASKS)
def test_model_of_another_task_is_rejected_briefly(folder, fields, task):
    (folder / "config.json").write_text(json.dumps(fields))
    message = refusal(folder)
    assert re.search(rf"holds {task}; only the classes of .* or serve this one in vLLM", message)
    assert len(message.replace(str(folder), "")) < 300


ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "their/base"}


@pytest.mark.parametrize("alone", [True, False])
def test_an_adapter_is_never_ignored(folder, alone):
    change(folder / "adapter_config.json", **ADAPTER)
    if alone:
        (folder / "config.json").unlink()
    for read in (LOADERS["model"], TensorStore.open):
        with pytest.raises(
            CheckpointError, match=r"holds an adapter \(LORA, .* into their/base with PEFT's merge_and_un"
        ):
            read(folder)
    (folder / "adapter_config.json").rename(folder / "adapter_model.safetensors")
    assert "holds an adapter (PEFT, adapter_model.safetensors)" in refusal(folder)


def test_folder_of_gguf_is_named(folder):
    (folder / "config.json").rename(folder / "model-q4.gguf")
    assert "holds a GGUF file, model-q4.gguf, and no config.json" in refusal(folder)


@pytest.mark.parametrize(("name", "fields"), ANOTHERS.values(), ids=ANOTHERS)
def test_weights_of_another_model_are_ignored(folder, plain, name, fields):
    save_with(plain, folder, name, fields)
    state = LOADERS["model"](folder).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in plain.state_dict().items())


@pytest.mark.parametrize("place", ["../model.safetensors", "shards/model.safetensors"])
def test_index_pointing_outside_folder_is_rejected(folder, plain, place):
    inner = folder / "inner"
    plain.save_pretrained(inner)
    (inner / "shards").mkdir()
    (inner / "model.safetensors").rename(inner / place)
    change(inner / "model.safetensors.index.json", weight_map=dict.fromkeys(plain.state_dict(), place))
    assert f"must name files in its folder, got '{place}'" in refusal(inner)


def test_folder_without_model_is_rejected_without_download(folder, tmp_path):
    assert "there is no folder" in refusal(tmp_path / "gone")
    (folder / "model.safetensors").unlink()
    assert "has no weights (model.safetensors, " in refusal(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    assert "no_such_model" in refusal(folder)
    (folder / "tokenizer_config.json").unlink()
    assert "has no tokenizer_config.json" in refusal(folder, "tokenizer")


def test_model_needing_its_own_code_is_rejected(folder):
    change(folder / "config.json", model_type="of_its_own", auto_map=MODEL)
    own = {"AutoTokenizer": ["its_own.Tokenizer", None]}
    change(folder / "tokenizer_config.json", tokenizer_class="Tokenizer", auto_map=own)
    for kind in LOADERS:
        assert "auto_map to code in its folder, which is never run." in refusal(folder, kind)


def test_known_model_loads_without_its_own_code(folder):
    change(folder / "config.json", auto_map=MODEL)
    assert type(LOADERS["model"](folder)) is transformers.LlamaForCausalLM


def test_tokenizer_that_panics_is_rejected(folder):
    merges = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}
    change(folder / "tokenizer.json", version="1.0", added_tokens=[], model=merges)
    change(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    assert f"the tokenizer in {folder} cannot be read: " in refusal(folder, "tokenizer")


def test_interrupt_is_not_a_tokenizer_error(folder, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_tokenizer(folder)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_weights_are_rejected(folder, value):
    model = LOADERS["model"](folder)
    # Far from the tokens that a target is tried on.
    model.model.embed_tokens.weight.data[-1, 3] = value
    named = r"NaN or infinity in 1 of them, model\.embed_tokens\.weight first\. Restore them"
    with pytest.raises(CheckpointError, match=named):
        models.TransformersTarget(model)


@pytest.mark.parametrize(
    ("dtype", "scale", "named"),
    [
        (torch.float16, 6e4, r"exceed what float16 holds, 6\.55e\+04\. Load it in bfloat16 or float32"),
        (torch.bfloat16, 1e38, r"bfloat16 holds, 3\.39e\+38\. Load it in float32"),
        (torch.float32, 3e38, r"float32 holds, 3\.403e\+38\. Restore the weights"),
    ],
)
def test_logit_overflow_is_named_with_dtype(folder, dtype, scale, named):
    model = LOADERS["model"](folder).to(dtype)
    model.lm_head.weight.data.fill_(scale)
    with pytest.raises(CheckpointError, match=f"logits of LlamaForCausalLM are NaN or infinite, .*{named}"):
        models.TransformersTarget(model)


def test_non_finite_buffer_is_rejected():
    """A router's bias, which chooses experts and reaches no logit."""
    mixture = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 8,
    }
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    config = transformers.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 2}, **mixture, **latent, first_k_dense_replace=0
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.model.layers[0].mlp.gate.e_score_correction_bias[3] = math.nan
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.gate\.e_score_correction_bias first"):
        models.TransformersTarget(model)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", LOADERS)
def test_invalid_config_is_named(folder, kind, name):
    text = (folder / name).read_text()
    for encoding in ("utf-8-sig", "utf-16"):
        (folder / name).write_bytes(text.encode(encoding))
        assert f"{name} must be utf-8 without a byte order mark, got utf" in refusal(folder, kind)
    (folder / name).write_text(text)
    change(folder / name, rms_norm_eps=math.nan)
    assert f"{name} is not valid JSON: rms_norm_eps is NaN" in refusal(folder, kind)


def test_infinite_limit_is_accepted(folder):
    change(folder / "config.json", time_step_limit=[0.0, math.inf], a_limit=math.inf)
    LOADERS["model"](folder)


def test_header_with_duplicate_name_is_rejected(folder):
    name = duplicate_name(folder / "model.safetensors")
    assert f"{name} is duplicated" in refusal(folder)


@pytest.mark.parametrize(("kind", "name"), [("model", "generation_config.json"), ("tokenizer", "tokenizer.json")])
def test_pipe_in_folder_is_rejected_before_reading(folder, pipe, kind, name):
    change(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    pipe(folder / name)
    assert f"{name} cannot be read: it is a pipe or a device" in refusal(folder, kind)
