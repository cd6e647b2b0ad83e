"""Targets from FP8 checkpoints: their numbers, which weights stay as they are, and files that contradict themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from attn_backends.kernels.linear.fp8_weight import Fp8Weight, widened
from spec_decode.models.causal_lm import load_target
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.fp8_store import Fp8Store
from spec_decode.models.checkpoints.store import TensorStore
from spec_decode.models.decoder import DecoderTarget
from spec_decode.models.target_fields import unserved
from tests.factories import CPU
from tests.spec_decode.models.checkpoints.fp8_folders import FP8, LAYOUTS, Tensors, compressed, write_fp8
from tests.spec_decode.models.test_decoder_target import TEXT, close, off, transformers, whole


def load(folder: Path, *, dtype: torch.dtype = torch.float32, quantises: bool = False) -> DecoderTarget:
    store = Fp8Store.open(folder)
    assert isinstance(store, Fp8Store) and unserved(store) is None
    store.keeps = dtype != torch.float32
    return load_target(store, dtype=dtype, device=CPU, quantises=quantises)


def products(target: torch.nn.Module) -> dict[str, Fp8Weight]:
    return {path: part for path, part in target.named_modules() if isinstance(part, Fp8Weight)}


@pytest.mark.parametrize("kind", ["llama-3", "qwen2-window", "qwen3-moe-some-dense"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_widened_logits_match_transformers(kind: str, layout: str, tmp_path: Path) -> None:
    wide = write_fp8(tmp_path, kind, layout)
    own = transformers.AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32, attn_implementation="eager")
    target = load(tmp_path)
    assert not products(target) and close(whole(target)[0], own(TEXT[None]).logits[0])


@pytest.mark.parametrize("kind", ["llama-3", "qwen3-moe"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_with_scales_of_outputs_stay_as_stored(kind: str, layout: str, tmp_path: Path) -> None:
    wide = write_fp8(tmp_path, kind, layout)
    found = load(tmp_path, dtype=torch.bfloat16)
    kept = products(found)
    if "block" in layout:
        assert not kept
        kept = products(rounded := load(tmp_path, dtype=torch.bfloat16, quantises=True))
        assert "lm_head.weight" in kept and len(kept) == 4 * 4 + 1
        assert off(whole(rounded.float())[0], whole(found.float())[0]) > 0
        return
    # In fp32, which leaves 8-bit weights as they are, these are the numbers of the file.
    wanted = load_target(TensorStore.open(wide), dtype=torch.float32, device=CPU)
    for path, weight in kept.items():
        place, _, name = path.rpartition(".")
        assert torch.equal(widened(weight.values, weight.scale), getattr(wanted.get_submodule(place), name))
    assert len(kept) == 4 * 4 and isinstance(found.lm_head.weight, torch.nn.Parameter)
    quantised = load(tmp_path, dtype=torch.bfloat16, quantises=True)
    assert all(torch.equal(products(quantised)[path].values, weight.values) for path, weight in kept.items())
    assert isinstance(quantised.lm_head.weight, Fp8Weight)


def test_projection_that_is_stored_in_two_forms_is_widened(tmp_path: Path) -> None:
    """As with an ignored q_proj: products read one form."""

    def widen(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".q_proj" in name]:
            part = tensors.pop(name)
            if part.dtype == FP8:
                tensors[name] = part.float() * 0.5

    write_fp8(tmp_path, "llama-3", "channel", widen)
    change_config(tmp_path, ignore=["lm_head", "re:.*q_proj"])
    found = load(tmp_path, dtype=torch.bfloat16)
    assert len(products(found)) == 4 * 3 and isinstance(found.layers[0].qkv.weight, torch.nn.Parameter)
    assert len(products(load(tmp_path, dtype=torch.bfloat16, quantises=True))) == 4 * 4 + 1


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    fields["quantization_config"] |= changes
    path.write_text(json.dumps(fields))


NAME = "model.layers.1.mlp.up_proj.weight"
SCALE = f"{NAME}_scale"


def put(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: make(tensors[name]).contiguous()})


def with_number(name: str, number: float) -> Callable[[Tensors], None]:
    return lambda tensors: tensors[name].flatten().__setitem__(3, number)


def with_byte(byte: int) -> Callable[[Tensors], None]:
    return lambda tensors: tensors[NAME].view(torch.uint8).flatten().__setitem__(5, byte)


BAD: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "no scale": (lambda tensors: tensors.pop(SCALE), "must have one scale, .*up_proj.weight_scale or .*, got 0"),
    "two scales": (lambda tensors: tensors.update({f"{NAME}_scale_inv": torch.ones(48, 1)}), "one scale, .*, got 2"),
    "a scale for each input": (
        put(SCALE, lambda scale: torch.ones(1, 32)),
        r"\[48, 1\] or \[48\] for \[48, 32\], got torch.float32 \[1, 32\]",
    ),
    "a scale too few": (put(SCALE, lambda scale: scale[1:]), r"got torch.float32 \[47, 1\]"),
    "one scale": (put(SCALE, lambda scale: scale[:1, 0]), r"got torch.float32 \[1\]"),
    "a scale of integers": (
        put(SCALE, lambda scale: scale.int()),
        "of 16 bits or more, .* got torch.int32",
    ),
    "a scale of 0": (with_number(SCALE, 0.0), r"up_proj.weight_scale in .* must be positive and finite, got 0.0"),
    "a negative scale": (with_number(SCALE, -1.0), "positive and finite, got -1.0"),
    "an infinite scale": (with_number(SCALE, torch.inf), "positive and finite, got inf"),
    "a scale of NaN": (with_number(SCALE, torch.nan), "positive and finite, got nan"),
    "a scale without its weight": (lambda tensors: tensors.pop(NAME), "is a scale without an FP8 "),
    "a scale beside 16 bits": (
        put(NAME, lambda weight: weight.float()),
        "has torch.float32, and config.json says FP8. Let it ignore",
    ),
    "a scale of an ignored layer": (
        lambda tensors: tensors.update({"lm_head.weight_scale": torch.ones(64, 1)}),
        "lm_head.weight_scale in .* is a scale without an FP8 lm_head.weight",
    ),
    "a scale in 8 bits": (put(SCALE, lambda scale: scale.to(FP8)), "of 16 bits or more, .* got torch.float8"),
    "a number that is NaN": (with_byte(0x7F), f"{NAME} in .* must hold numbers, got NaN"),
    "and with a sign": (with_byte(0xFF), "must hold numbers, got NaN"),
    "an ignored weight in FP8": (
        lambda tensors: tensors.update(
            {
                "lm_head.weight": tensors["lm_head.weight"].to(FP8),
                "lm_head.weight_scale": torch.ones(64, 1),
            }
        ),
        "lm_head.weight in .* is in FP8, and config.json says that lm_head is not",
    ),
    "another 8-bit float": (put(NAME, lambda weight: weight.to(torch.float8_e5m2)), "has torch.float8_e5m2"),
    "a bias in FP8": (
        lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].to(FP8)}),
        r"model.norm.weight in .* \[32\]; 8 bits are read as torch.float8_e4m3fn \[N, K\]",
    ),
    "a weight of another size": (put(NAME, lambda weight: weight[:, 1:]), r"must be \[48, 32\], got \[48, 31\]"),
}


@pytest.mark.parametrize(("change", "why"), BAD.values(), ids=BAD)
def test_contradicting_tensors_are_rejected(change: Callable[[Tensors], None], why: str, tmp_path: Path) -> None:
    write_fp8(tmp_path, "llama-3", "channel", change)
    with pytest.raises(CheckpointError, match=why):
        load(tmp_path)


CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def scales(tensors: Tensors, form: str = "self_attn.{}_scale", **changed: Any) -> None:
    """Add scales of an 8-bit cache: 0.5 + layer, and twice as much for values. changed: those of layer 1."""
    for layer in range(4):
        for part, scale in (("k", 0.5 + layer), ("v", 1.0 + 2 * layer)):
            tensors[f"model.layers.{layer}." + form.format(part)] = torch.tensor([scale])
    tensors.update({f"model.layers.1.self_attn.{part}_scale": scale for part, scale in changed.items()})


@pytest.mark.parametrize("form", ["self_attn.{}_scale", "self_attn.{0}_proj.{0}_scale"])
def test_calibrated_scales_of_a_cache_are_read_by_layer(form: str, tmp_path: Path) -> None:
    write_fp8(tmp_path, "llama-3", "channel", lambda tensors: scales(tensors, form))
    change_config(tmp_path, kv_cache_scheme=CACHE)
    assert load(tmp_path).kv_scales == {0: (0.5, 1.0), 1: (1.5, 3.0), 2: (2.5, 5.0), 3: (3.5, 7.0)}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (
            {"k": torch.tensor(0.0)},
            r"k_scale in .* must be one positive, finite number, got torch.float32 \[\] \[0.0\]",
        ),
        ({"v": torch.tensor(torch.nan)}, r"v_scale in .* got torch.float32 \[\] \[nan\]"),
        ({"v": torch.ones(2)}, r"v_scale in .* got torch.float32 \[2\]"),
        ({"k": torch.ones(1, dtype=torch.int32)}, "got torch.int32"),
    ],
)
def test_wrong_scales_of_a_cache_are_rejected(changed: Any, why: str, tmp_path: Path) -> None:
    write_fp8(tmp_path, "llama-3", "channel", lambda tensors: scales(tensors, **changed))
    with pytest.raises(CheckpointError, match=why):
        load(tmp_path)


def test_a_scale_of_a_cache_that_is_missing_or_twice_there_is_rejected(tmp_path: Path) -> None:
    def one_less(tensors: Tensors) -> None:
        scales(tensors)
        del tensors["model.layers.1.self_attn.v_scale"]

    def one_more(tensors: Tensors) -> None:
        scales(tensors)
        tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(1)

    def of_no_layer(tensors: Tensors) -> None:
        scales(tensors)
        tensors["model.layers.9.self_attn.k_scale"] = torch.ones(1)

    for place, (change, why) in enumerate(
        (
            (one_less, "v_scale of layer 1 is missing"),
            (one_more, "two scales for layer 0"),
            (of_no_layer, "k_scale of layer 9 belongs to no such layer"),
        )
    ):
        (folder := tmp_path / str(place)).mkdir()
        write_fp8(folder, "llama-3", "channel", change)
        with pytest.raises(CheckpointError, match=why):
            load(folder)


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "a cache in 4 bits": (
        {"kv_cache_scheme": {**CACHE, "num_bits": 4}},
        "num_bits in kv_cache_scheme .* must be 8, got 4",
    ),
    "scales made at run time": (
        {"kv_cache_scheme": {**CACHE, "dynamic": True}},
        "dynamic in .* must be False, got True",
    ),
    "scales of heads": ({"kv_cache_scheme": {**CACHE, "strategy": "attn_head"}}, "strategy in .* must be 'tensor'"),
    "a cache without scales": ({"kv_cache_scheme": CACHE}, "but no k_scale and v_scale of any layer"),
    "rotated weights": ({"transform_config": {"config_groups": {"a": 1}}}, "has transform_config"),
    "pruned weights": ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "format in sparsity_config .* 'dense'"),
    "no size of blocks": (
        {"config_groups": {"a": {"targets": ["Linear"], "weights": {"strategy": "block"}}}},
        "strategy in weights .* is block, and there is no block_structure",
    ),
    "groups of inputs": (compressed("group"), r"strategy must be tensor, channel or block .*, got \['group'\]"),
    "no group": ({"config_groups": {}}, r"strategy must be .*, got \[\]"),
    "scales of other weights": (compressed("tensor"), r"\[\] or \[1\] for "),
    "no pattern": ({"ignore": ["lm_head", "re:("]}, r"has the pattern '\('"),
    "a repeated group": ({"ignore": ["re:(l|lm)*x$", "lm_head"]}, "repeats a group or too many characters"),
    "many repeats": ({"ignore": ["re:.*.*.*.*.*x", "lm_head"]}, "repeats a group or too many characters"),
    "many options": ({"ignore": ["re:" + "m?" * 9, "lm_head"]}, "repeats a group or too many characters"),
    "names that are none": ({"ignore": "lm_head"}, "ignore in quantization_config .* must be a list"),
    "a layer that is not ignored": ({"ignore": []}, "lm_head.weight in .* has torch.float32, and .* says FP8"),
    "ignored layers in FP8": (
        {"ignore": ["lm_head", "re:.*layers.2"]},
        "says that model.layers.2.mlp.down_proj is not",
    ),
}


@pytest.mark.parametrize(("changes", "why"), CONFIGS.values(), ids=CONFIGS)
def test_contradicting_configs_are_rejected(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    write_fp8(tmp_path, "llama-3", "channel")
    change_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=why):
        load(tmp_path)


TARGETS = {"all by a pattern": (["re:.*_proj$"], True), "a part of them": (["re:.*[qkvo]_proj$"], False)}


@pytest.mark.parametrize(("targets", "fits"), TARGETS.values(), ids=TARGETS)
def test_targets_of_groups_name_what_is_quantised(targets: list[str], fits: bool, tmp_path: Path) -> None:
    write_fp8(tmp_path, "llama-3", "channel")
    config = compressed("channel", ignore=[])
    config["config_groups"]["group_0"]["targets"] = targets
    change_config(tmp_path, **config)
    if fits:
        assert products(load(tmp_path, dtype=torch.bfloat16))
    else:
        with pytest.raises(CheckpointError, match=r"says that model.layers.0.mlp.down_proj is not"):
            load(tmp_path)


def test_experts_in_two_forms_are_rejected(tmp_path: Path) -> None:
    name = "model.layers.2.mlp.experts.3.up_proj"

    def widen(tensors: Tensors) -> None:
        for part in ("gate", "up"):
            tensors.pop(f"{name.replace('up', part)}.weight_scale")
            tensors[f"{name.replace('up', part)}.weight"] = tensors[f"{name.replace('up', part)}.weight"].float()

    write_fp8(tmp_path, "qwen3-moe", "channel", widen)
    change_config(tmp_path, ignore=["lm_head", "re:.*mlp.gate$", "re:.*layers.2.*experts.3.(gate|up)_proj"])
    with pytest.raises(CheckpointError, match=r"some of model.layers.2.mlp.experts in .* in 8 bits .* not, 3 first"):
        load(tmp_path, dtype=torch.bfloat16)


def test_other_formats_are_left_to_other_readers(tmp_path: Path) -> None:
    write_fp8(tmp_path, "llama-3", "channel", lambda tensors: None)
    change_config(tmp_path, format="pack-quantized")
    assert type(Fp8Store.open(tmp_path)) is TensorStore
    assert load_file(tmp_path / "model.safetensors")[NAME].dtype == FP8


@pytest.mark.parametrize(
    ("dtype", "scale", "remedy"),
    [(torch.float16, 1e6, "Load it as bfloat16"), (torch.float32, 3e38, "Restore"), (torch.bfloat16, 3e38, "Restore")],
)
def test_numbers_too_large_for_a_dtype_are_rejected(
    dtype: torch.dtype, scale: float, remedy: str, tmp_path: Path
) -> None:
    write_fp8(tmp_path, "llama-3", "blocks", put(f"{NAME}_scale_inv", lambda stored: torch.full_like(stored, scale)))
    with pytest.raises(CheckpointError, match=rf"has numbers too large for {dtype}. {remedy}"):
        load(tmp_path, dtype=dtype)
