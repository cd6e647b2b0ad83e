"""Targets whose products read 8-bit weights: made while they load, or published."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from attn_backends.kernels.linear.fp8_weight import Fp8Weight, widened
from builders import BatchError
from spec_decode.cli.main import main
from spec_decode.llm import LLM, SamplingParams
from spec_decode.models import CheckpointError
from spec_decode.models.causal_lm import load_target
from spec_decode.models.checkpoints.store import TensorStore
from spec_decode.models.decoder import DecoderTarget
from spec_decode.models.eagle import EagleDraft
from tests.factories import CPU
from tests.spec_decode.llm.test_published import write_model, write_tokenizer
from tests.spec_decode.llm.test_published_targets import WORDS, texts
from tests.spec_decode.models.checkpoints.fp8_folders import write_fp8
from tests.spec_decode.models.test_decoder_target import close, folder_of, make_model, whole

KINDS = ("llama-3", "llama-biased", "smollm2", "qwen3-moe-some-dense", "qwen3.5", "qwen3-next")


def load(kind: str, *, quantises: bool = True) -> DecoderTarget:
    return load_target(TensorStore.open(folder_of(kind)), dtype=torch.bfloat16, device=CPU, quantises=quantises)


def products(target: torch.nn.Module) -> dict[str, Fp8Weight]:
    return {path: part for path, part in target.named_modules() if isinstance(part, Fp8Weight)}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_widened_weights(kind: str) -> None:
    target, wide = load(kind), load(kind, quantises=False)
    left = {path for path, weight in target.named_parameters() if weight.dim() > 1}
    parts = ("mlp.router", "mlp.shared.gate", "attention.project_gates", "attention.convolution")
    assert left <= {"embed.weight", *(f"layers.{layer}.{part}" for layer in range(4) for part in parts)}
    # In fp32, which leaves 8-bit weights as they are.
    before = whole(wide.float())[0]
    for path, weight in products(target).items():
        place = wide.get_submodule(path.rpartition(".")[0])
        name = path.rpartition(".")[2]
        setattr(place, name, torch.nn.Parameter(widened(weight.values, weight.scale), requires_grad=False))
    found, wanted = whole(target.float())[0], whole(wide)[0]
    assert close(found, wanted) and not close(found, before)


def test_tied_embedding_stays_in_16_bits() -> None:
    target, wide = load("smollm2"), load("smollm2", quantises=False)
    head = target.lm_head.weight
    assert isinstance(head, Fp8Weight) and torch.equal(head.values, Fp8Weight.of(wide.embed.weight).values)
    assert torch.equal(target.embed.weight, wide.embed.weight)
    assert torch.equal(target.output_projection, widened(head.values, head.scale).bfloat16())


@pytest.mark.parametrize("kind", ["llama-3", "qwen3-moe"])
def test_one_product_at_a_time_is_in_16_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the device's memory: the whole model must not exist in 16 bits first."""
    living: list[Any] = []
    most, take = 0, TensorStore.take

    def counting(self: TensorStore, name: str, shape: Any, *rest: Any) -> torch.Tensor:
        nonlocal most, living
        living = [reference for reference in living if reference() is not None]
        most = max(most, len(living))
        tensor = take(self, name, shape, *rest)
        if tensor.dtype == torch.bfloat16 and tensor.dim() > 1 and "embed" not in name:
            living.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(TensorStore, "take", counting)
    load(kind)
    assert most <= 3, "those of query, key and value"


@pytest.mark.parametrize("draft_weights", [None, "fp8"])
def test_drafts_change_no_text_of_an_fp8_target(draft_weights: str | None, tmp_path: Path) -> None:
    folder, draft = tmp_path / "target", tmp_path / "draft"
    for path in (folder, draft):
        model = make_model("smollm2")
        model.model.norm.weight.data.add_(0.2 * (path is draft))
        model.save_pretrained(path)
    write_tokenizer(folder, WORDS)
    settings: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "batch_invariant": True}
    plain = LLM(folder, weights="fp8", **settings)
    drafted = LLM(folder, draft=draft, num_speculative_tokens=3, weights="fp8", draft_weights=draft_weights, **settings)
    assert texts(drafted) == texts(plain) and drafted.engine.stats.mean_accepted > 0
    assert bool(products(drafted.pair.draft)) is bool(draft_weights)
    assert "target's matrix products read fp8 weights" in plain.explain()
    assert "fp8" not in LLM(folder, **settings).explain()


HEADS = {"both": ("fp8", "fp8"), "the target": ("fp8", None), "the draft": (None, "fp8")}


@pytest.mark.parametrize(("weights", "draft_weights"), HEADS.values(), ids=HEADS)
def test_shared_head_is_read_in_its_targets_form(weights: str | None, draft_weights: str | None) -> None:
    settings: dict[str, Any] = {"weights": weights, "draft_weights": draft_weights}
    llm = LLM("pydoc", draft="draft", device="cpu", dtype="bfloat16", max_num_seqs=2, max_model_len=96, **settings)
    target, draft = llm.pair.target, llm.pair.draft
    assert isinstance(draft, EagleDraft) and bool(products(target)) is bool(weights)
    hidden = torch.linspace(-1, 1, target.hidden_size).bfloat16()[None]
    equal = torch.equal(draft.logits(hidden), target.logits(hidden))
    assert (draft.head.weight is None) is bool(weights) is equal
    assert len(llm.generate("def ", SamplingParams(max_tokens=4), progress=False)[0].token_ids) == 4


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "transformers": (
        {"target": "transformers"},
        CheckpointError,
        "would run in transformers, which gets no quantised weights: you asked for it. Leave weights out",
    ),
    "float32": ({"dtype": "auto"}, BatchError, "weights='fp8' needs models in bfloat16 or float16, got float32"),
    "another name": ({"weights": "int8"}, BatchError, r"weights is 'int8'\..* Pass one of fp8, or leave it out"),
}


@pytest.mark.parametrize(("change", "error", "why"), REFUSED.values(), ids=REFUSED)
def test_unsuitable_settings_are_rejected_before_loading(
    change: dict[str, Any], error: type[Exception], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path)
    monkeypatch.setattr("spec_decode.models.hf.folder.load_tokenizer", None)
    with pytest.raises(error, match=why):
        LLM(tmp_path, device="cpu", **{"dtype": "bfloat16", "weights": "fp8", **change})


def test_families_of_other_layers_stay_in_16_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, mlp_bias=True)
    monkeypatch.setattr("spec_decode.models.hf.folder.load_tokenizer", None)
    with pytest.raises(CheckpointError, match=r"which gets no quantised weights: mlp_bias in config\.json is True"):
        LLM(tmp_path, device="cpu", dtype="bfloat16", weights="fp8")


def test_the_command_line_quantises_the_target() -> None:
    words = ["draft", "x", "--device", "cpu", "--dtype", "bfloat16", "--weights", "fp8", "--max-tokens", "4", "-k", "0"]
    result = CliRunner().invoke(main, [*words, "--explain"])
    assert result.exit_code == 0 and "target's matrix products read fp8 weights" in result.output, result.output
    assert " on cpu, bfloat16, weights in fp8\n" in result.output


SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16"}
READS = {
    "as stored": ("channel", SETTINGS, "read fp8 weights, as stored"),
    "in part": ("one tensor", {**SETTINGS, "weights": "fp8"}, "read fp8 weights, as stored where there are any"),
    "blocks": ("blocks", SETTINGS, "read bfloat16 weights, widened from FP8 in blocks of 16 x 24"),
    "rounded blocks": (
        "blocks",
        {**SETTINGS, "weights": "fp8"},
        "read fp8 weights, rounded again from FP8 in blocks of 16 x 24",
    ),
    "fp32": ("channel", {"device": "cpu"}, "read float32 weights, widened from FP8"),
}


@pytest.mark.parametrize(("layout", "settings", "reads"), READS.values(), ids=READS)
def test_published_fp8_targets_say_how_they_are_read(
    layout: str, settings: dict[str, Any], reads: str, tmp_path: Path
) -> None:
    wide = write_fp8(tmp_path, "llama-3", layout)
    write_tokenizer(tmp_path, WORDS)
    llm = LLM(tmp_path, **settings)
    assert f"target's matrix products {reads}\n" in llm.explain()
    found = texts(llm)
    assert all(len(text) == 12 for text in found)
    if "dtype" not in settings:
        write_tokenizer(wide, WORDS)
        assert found == texts(LLM(wide, device="cpu", target="transformers"))


@pytest.mark.parametrize("weights", [None, "fp8"])
def test_plain_drafts_change_no_text_of_a_published_fp8_target(weights: str | None, tmp_path: Path) -> None:
    wide = write_fp8(tmp_path, "qwen3-moe", "channel")
    write_tokenizer(tmp_path, WORDS)
    settings: dict[str, Any] = {**SETTINGS, "weights": weights, "batch_invariant": True}
    drafted = LLM(tmp_path, draft=wide, num_speculative_tokens=3, **settings)
    assert texts(drafted) == texts(LLM(tmp_path, **settings)) and drafted.engine.stats.mean_accepted > 0


def in_transformers(folder: Path) -> dict[str, Any]:
    return {"target": "transformers"}


def of_other_layers(folder: Path) -> dict[str, Any]:
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "logit_scale": 0.5}))
    return {}


def of_another_scale(folder: Path) -> dict[str, Any]:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_scale"][1] = -1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return {}


def as_a_draft(folder: Path) -> dict[str, Any]:
    write_tokenizer(folder / "wide", WORDS)
    return {"model": folder / "wide", "draft": folder}


PUBLISHED = {
    "in transformers": (
        in_transformers,
        "has method 'compressed-tensors float-quantized'; a target .* Leave target out, or use",
    ),
    "of other layers": (
        of_other_layers,
        "would run in transformers, which gets no quantised weights: .* has logit_scale",
    ),
    "with a wrong scale": (of_another_scale, "up_proj.weight_scale in .* must be positive and finite, got -1"),
    "as a draft": (as_a_draft, "; a draft reads none. Use a bf16 copy"),
}


@pytest.mark.parametrize(("change", "why"), PUBLISHED.values(), ids=PUBLISHED)
def test_unread_fp8_folders_are_rejected_before_loading(
    change: Any, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_fp8(tmp_path, "llama-3", "channel")
    write_tokenizer(tmp_path, WORDS)
    settings = {"model": tmp_path, **SETTINGS, **change(tmp_path)}
    monkeypatch.setattr("spec_decode.llm.load.load_target", None)
    monkeypatch.setattr("spec_decode.models.hf.folder.load_model", None)
    with pytest.raises(CheckpointError, match=why):
        LLM(**settings)
