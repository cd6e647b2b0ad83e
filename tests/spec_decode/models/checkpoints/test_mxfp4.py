"""GPT-OSS with experts in MXFP4, compared with the same experts as `transformers` widens them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_decode.llm import LLM, SamplingParams
from spec_decode.models import CheckpointError
from spec_decode.models.causal_lm import load_target
from spec_decode.models.checkpoints.mxfp4 import take_blocks, widened
from spec_decode.models.checkpoints.store import ScopedWeights, TensorStore
from spec_decode.models.target_fields import unserved
from tests.factories import CPU
from tests.spec_decode.llm.test_published import write_tokenizer
from tests.spec_decode.models.test_decoder_target import changed, config_of, load, make_model, whole

mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")

WORDS = ["<end>", "<turn>", *(f"w{i}" for i in range(62))]
PROJECTIONS = ("gate_up_proj", "down_proj")
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
Tensors = dict[str, torch.Tensor]


def draw(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_widened_weights_match_transformers(dtype: torch.dtype) -> None:
    blocks, scales = draw(3, 8, 4, 16), draw(3, 8, 4, low=120, high=132)
    wanted = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=dtype)

    assert torch.equal(widened(blocks, scales, dtype, "w"), wanted.mT)


@pytest.mark.parametrize("scale", [0, 1, 127, 200, 251])
def test_every_code_has_its_value(scale: int) -> None:
    blocks = torch.arange(16, dtype=torch.uint8).view(1, 1, 1, 16) * 17
    found = widened(blocks, torch.tensor([[[scale]]], dtype=torch.uint8), torch.float32, "w")
    # Sign, two bits of an exponent with a bias of 1, and one of the mantissa.
    halves = [(m if e == 0 else (2 + m) << (e - 1)) * 0.5 for e in range(4) for m in range(2)]

    wanted = [value * 2.0 ** (scale - 127) for value in (*halves, *(-value for value in halves)) for _ in range(2)]
    assert found.flatten().tolist() == wanted


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same model with experts in MXFP4 and in fp32."""
    narrow, wide = tmp_path_factory.mktemp("narrow"), tmp_path_factory.mktemp("wide")
    model = make_model("gpt-oss", intermediate_size=64)
    stored: Tensors = {}
    for name, parameter in model.named_parameters():
        if not name.endswith(PROJECTIONS):
            continue
        count, columns, rows = parameter.shape
        blocks, scales = draw(count, rows, columns // 32, 16), draw(count, rows, columns // 32, low=122, high=125)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        parameter.data.copy_(mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    for folder in (narrow, wide):
        model.save_pretrained(folder)
        write_tokenizer(folder, WORDS)
    kept = {name: t for name, t in load_file(wide / "model.safetensors").items() if not name.endswith(PROJECTIONS)}
    write(narrow, {**config_of(wide), "quantization_config": CONFIG}, {**kept, **stored})
    return narrow, wide


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_target_computes_the_logits_of_its_widened_weights(folders: tuple[Path, Path]) -> None:
    narrow, wide = folders

    assert torch.equal(whole(load(narrow))[0], whole(load(wide))[0])


def test_texts_match_those_of_transformers(folders: tuple[Path, Path]) -> None:
    narrow, wide = folders
    ours, library = LLM(narrow, device="cpu"), LLM(wide, device="cpu", target="transformers")
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    found, wanted = ([list(c.token_ids) for c in llm.generate([[5, 9], [17]], params)] for llm in (ours, library))

    assert found == wanted
    assert "target's matrix products read float32 weights, widened from experts in MXFP4" in ours.explain()


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def replaced(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: change(tensors[name]).contiguous()}


BAD: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "no scales": (without(f"{GATE_UP}_scales"), f"lacks the tensor {GATE_UP}_scales"),
    "no blocks": (without(f"{GATE_UP}_blocks"), f"lacks the tensor {GATE_UP};"),
    "wide scales": (replaced(f"{GATE_UP}_scales", torch.Tensor.int), "must be torch.uint8 .* got torch.int32"),
    "float blocks": (replaced(f"{GATE_UP}_blocks", torch.Tensor.half), "must be torch.uint8 .* got torch.float16"),
    "NaN": (replaced(f"{GATE_UP}_scales", lambda t: t.fill_(255)), f"{GATE_UP}_scales in .* got NaN"),
    "too large": (
        replaced(f"{GATE_UP}_scales", lambda t: t.fill_(254)),
        f"{GATE_UP} in .* too large for torch.float32. Restore",
    ),
    "other blocks": (replaced(f"{GATE_UP}_blocks", lambda t: t[:, :-1]), f"{GATE_UP}_blocks in .* must be"),
    "other scales": (replaced(f"{GATE_UP}_scales", lambda t: t[:-1]), f"{GATE_UP}_scales in .* must be"),
    "doubled": (lambda tensors: {**tensors, GATE_UP: torch.zeros(6, 32, 128)}, f"{GATE_UP} in .* is not in MXFP4"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_bad_tensors_are_named(
    change: Callable[[Tensors], Tensors], message: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    write(tmp_path, config_of(folders[0]), change(load_file(folders[0] / "model.safetensors")))
    with pytest.raises(CheckpointError, match=message):
        load_target(TensorStore.open(tmp_path), dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("quantization_config", {**CONFIG, "block": 16}, "holds quantised weights: .* method 'mxfp4'"),
        ("quantization_config", {"quant_method": "awq"}, "holds quantised weights: .* method 'awq'"),
        (
            "quantization_config",
            {**CONFIG, "modules_to_not_convert": ["model.layers.*.mlp.experts"]},
            "0.mlp.experts.down_proj_blocks in .* is in MXFP4, and .* says that model.layers.0.mlp.experts is not",
        ),
        ("logits_scaling", 2.0, "gets no quantised weights: config.json has logits_scaling"),
    ],
)
def test_config_that_says_otherwise_is_refused(
    field: str, value: Any, message: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    config = changed(config_of(folders[0]), field, value)
    write(tmp_path, config, load_file(folders[0] / "model.safetensors"))
    write_tokenizer(tmp_path, WORDS)
    with pytest.raises(CheckpointError, match=message):
        LLM(tmp_path, device="cpu")


def test_wide_experts_must_be_named_by_the_config(folders: tuple[Path, Path], tmp_path: Path) -> None:
    config, tensors = config_of(folders[0]), load_file(folders[1] / "model.safetensors")
    write(tmp_path, config, tensors)
    with pytest.raises(CheckpointError, match=r"down_proj in .* is not in MXFP4, and .*mlp.experts is\. Use weights"):
        load(tmp_path)
    named = {**CONFIG, "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.experts"]}
    write(tmp_path, {**config, "quantization_config": named}, tensors)
    assert torch.equal(whole(load(tmp_path))[0], whole(load(folders[1]))[0])


def test_inputs_that_are_no_whole_blocks_are_refused(folders: tuple[Path, Path]) -> None:
    weights = ScopedWeights(TensorStore.open(folders[0]), "model.layers.1.mlp.experts.", torch.float32, CPU)
    with pytest.raises(CheckpointError, match=r"gate_up_proj in .* blocks of 32 inputs, and config\.json says 48"):
        take_blocks(weights, "gate_up_proj", 6, 128, 48)


def test_weights_without_their_config_are_left_to_transformers(folders: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = load_file(folders[0] / "model.safetensors")
    write(tmp_path, config_of(folders[1]), tensors)
    assert "the weights have model.layers.0.mlp.experts.down_proj_blocks" in str(unserved(TensorStore.open(tmp_path)))


@pytest.mark.parametrize("settings", [{"target": "transformers"}, {"draft": True}], ids=str)
def test_other_users_of_the_weights_are_refused(settings: dict[str, Any], folders: tuple[Path, Path]) -> None:
    narrow, wide = folders
    arguments = {"draft": narrow} if "draft" in settings else settings
    with pytest.raises(CheckpointError, match=r"method 'mxfp4'; a (draft|target in transformers) reads none"):
        LLM(wide if "draft" in settings else narrow, device="cpu", **arguments)
