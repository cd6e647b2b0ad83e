"""Folders of hybrid targets: where their tensors are, inside models that read pictures too, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_decode.models import CheckpointError
from spec_decode.models.causal_lm import keeps_states
from spec_decode.models.checkpoints.store import TensorStore
from spec_decode.models.layer_windows import FULL, RECURRENT, SLIDING
from spec_decode.models.target_fields import unserved

transformers = pytest.importorskip("transformers")

from spec_decode.models.hf.folder import check_model  # noqa: E402
from tests.spec_decode.models.test_decoder_target import (  # noqa: E402
    TEXT,
    close,
    config_of,
    folder_of,
    load,
    whole,
)


@pytest.fixture
def copied(kind: str, tmp_path: Path) -> Path:
    return Path(copytree(folder_of(kind), tmp_path / "target"))


def with_pictures(kind: str, folder: Path, **around: Any) -> Path:
    """A folder of the same text model inside one that reads pictures, with a layer that drafts, as Qwen publishes
    it."""
    config = config_of(folder_of(kind))
    family, name = config["model_type"].removesuffix("_text"), config["architectures"][0]
    outer = {"architectures": [name.replace("ForCausalLM", "ForConditionalGeneration")], "model_type": family}
    outer |= {"text_config": config, "image_token_id": 60, "tie_word_embeddings": config["tie_word_embeddings"]}
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(folder_of(kind) / "model.safetensors").items()
    }
    tensors |= {"model.visual.pos_embed.weight": torch.ones(2, 2), "mtp.norm.weight": torch.ones(32)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**outer, **around}))
    return folder


@pytest.mark.parametrize("kind", ["qwen3.5", "qwen3.5-tied", "qwen3.5-moe"])
def test_language_model_beside_pictures_is_found(kind: str, tmp_path: Path) -> None:
    folder = with_pictures(kind, tmp_path)
    check_model(folder)
    own = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    found = whole(load(folder))[0]
    assert found.equal(whole(load(folder_of(kind)))[0]) and close(found, own(TEXT[None]).logits[0])


@pytest.mark.parametrize(
    ("around", "why"),
    [
        ({"model_type": "qwen3_5_moe"}, "model_type 'qwen3_5_moe' around a text_config of qwen3_5_text"),
        ({"logit_scale": 2.0}, "config.json has logit_scale beside its text_config"),
        ({"quantization_config": {}}, "config.json has quantization_config beside its text_config"),
        ({"quantization_config": None}, None),
        ({"tie_word_embeddings": True}, "config.json and its text_config differ in tie_word_embeddings"),
        ({"text_config": None}, "model_type None"),
        ({"text_config": [1]}, "text_config in .* must be an object"),
    ],
)
def test_fields_around_a_language_model_are_not_ignored(
    around: dict[str, Any], why: str | None, tmp_path: Path
) -> None:
    found = unserved(TensorStore.open(with_pictures("qwen3.5", tmp_path, **around)))
    assert found is None if why is None else re.search(why, str(found))


def test_layers_without_attention_have_no_scales_of_a_cache(tmp_path: Path) -> None:
    folder = with_pictures("qwen3.5", tmp_path)
    path, at = folder / "model.safetensors", "model.language_model.layers"
    scales = {f"{at}.{layer}.self_attn.{part}_scale": torch.tensor(0.5) for layer in (1, 3) for part in "kv"}
    save_file({**load_file(path), **scales}, path, {"format": "pt"})
    assert load(folder).kv_scales == {1: (0.5, 0.5), 3: (0.5, 0.5)}


def other_prefix(old: str, new: str, folder: Path) -> Path:
    """Rename all tensors of a folder that begin with `old`."""
    path = folder / "model.safetensors"
    tensors = {re.sub(f"^{old}", new, name): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    return folder


@pytest.mark.parametrize("kind", ["qwen3.5"])
def test_names_that_only_transformers_reads_are_left_to_it(kind: str, copied: Path, tmp_path: Path) -> None:
    text = other_prefix(r"model\.", "model.language_model.", copied)
    assert "the weights have model.language_model.embed_tokens.weight" in str(unserved(TensorStore.open(text)))
    (outer := tmp_path / "pictures").mkdir()
    nested = other_prefix(r"model\.language_model\.", "model.", with_pictures(kind, outer))
    assert "the weights have model.embed_tokens.weight" in str(unserved(TensorStore.open(nested)))


@pytest.mark.parametrize("kind", ["qwen3-next"])
def test_sizes_of_a_config_allocate_nothing(kind: str, copied: Path) -> None:
    heads = {"linear_num_key_heads": 2**28, "linear_num_value_heads": 2**28}
    (copied / "config.json").write_text(json.dumps({**config_of(copied), **heads}))
    with pytest.raises(CheckpointError, match=r"in_proj_qkvz\.weight in .* must be \[\d{11}, 32\], got \[128, 32\]"):
        load(copied)


@pytest.mark.parametrize("kind", ["qwen3-next"])
def test_missing_part_of_a_hybrid_has_its_name(kind: str, copied: Path) -> None:
    path = copied / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.linear_attn.in_proj_qkvz.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks the tensor model\.layers\.0\.linear_attn\.in_proj_qkvz\.weight"):
        load(copied)


@pytest.mark.parametrize("layers", [[FULL] * 4, [RECURRENT, FULL, FULL, FULL]])
@pytest.mark.parametrize("kind", ["qwen3.5"])
def test_only_layers_with_states_keep_states(kind: str, layers: list[str], copied: Path) -> None:
    (copied / "config.json").write_text(json.dumps({**config_of(copied), "layer_types": layers}))
    assert keeps_states(TensorStore.open(copied)) is (RECURRENT in layers)
    assert not keeps_states(TensorStore.open(folder_of("llama-2")))


def test_unknown_part_of_a_hybrid_is_refused(tmp_path: Path) -> None:
    folder = with_pictures("qwen3.5", tmp_path)
    path = folder / "model.safetensors"
    save_file({**load_file(path), "model.language_model.layers.0.more.weight": torch.ones(1)}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 unexpected tensors under model\.language_model\.: .*0\.more"):
        load(folder)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"layer_types": [RECURRENT] * 4}, r"layer_types in .* full_attention at least once, got \["),
        ({"layer_types": [FULL, SLIDING, FULL, FULL]}, "must name full_attention or linear_attention for each of 4"),
        ({"layer_types": [FULL] * 3}, "for each of 4 layers"),
        ({"layer_types": None, "full_attention_interval": 0}, "got None and full_attention_interval 0"),
        ({"linear_num_value_heads": 3}, "invalid recurrent layers in .* must be a multiple of num_key_heads"),
        ({"linear_conv_kernel_dim": 4}, r"conv1d\.weight in .* must be \[80, 1, 4\], got \[80, 1, 3\]"),
    ],
)
@pytest.mark.parametrize("kind", ["qwen3.5"])
def test_impossible_hybrid_is_refused(kind: str, copied: Path, fields: dict[str, Any], why: str) -> None:
    (copied / "config.json").write_text(json.dumps({**config_of(copied), **fields}))
    with pytest.raises(CheckpointError, match=why):
        load(copied)


@pytest.mark.parametrize("kind", ["llama-2"])
def test_part_of_a_hybrid_in_another_family_is_left_to_transformers(kind: str, copied: Path) -> None:
    path = copied / "model.safetensors"
    save_file({**load_file(path), "model.layers.0.linear_attn.A_log": torch.ones(1)}, path, {"format": "pt"})
    assert "the weights have model.layers.0.linear_attn.A_log" in str(unserved(TensorStore.open(copied)))
