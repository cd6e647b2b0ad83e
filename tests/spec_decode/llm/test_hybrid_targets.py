"""Hybrid targets from their folders: greedy texts of `LLM` are those of `transformers`, however they are drafted."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from attn_backends import NoBackend, register, unregister
from attn_backends.torch_state import TorchState
from builders import BatchError
from spec_decode.llm import LLM, SamplingParams
from spec_decode.models import CheckpointError, TransformersTarget
from spec_decode.trees import DraftTree
from tests.spec_decode.engine.hybrid_helpers import (
    FAMILIES,
    NEW,
    PROMPTS,
    SIZES,
    VOCAB,
    WITH_MTP,
    make_model,
    transformers,
    wanted,
)
from tests.spec_decode.llm.test_published import write_tokenizer
from tests.spec_decode.models.generated import make_causal
from tests.spec_decode.models.generated_mtp import QWEN_CONFIG, QWEN_MOE_CONFIG, make_mtp

WORDS = ["<end>", *(f"w{i}" for i in range(VOCAB - 1))]
GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "draft": {"draft": "draft", "num_speculative_tokens": 3},
    "draft in graphs": {"draft": "draft", "num_speculative_tokens": 3, "strategy": "full_loop"},
    "tree": {"draft": "draft", "num_speculative_tokens": 2, "tree": DraftTree((0, 0, 1, 2))},
    "own MTP layer": {"draft": "", "num_speculative_tokens": 3},
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the folder of a family's model, with the layer that drafts for it as Qwen publishes both, and with the
    folder of a small language model in it."""

    @cache
    def folder(family: str) -> Path:
        path = tmp_path_factory.mktemp(family)
        write_tokenizer(path, WORDS)
        make_model(family).save_pretrained(path)
        draft = make_causal(vocab_size=VOCAB, max_position_embeddings=96)
        (path / "draft").mkdir()
        draft.write(path / "draft")
        if family in WITH_MTP:
            add_mtp(path, family)
        return path

    return folder


def add_mtp(path: Path, family: str) -> None:
    config = json.loads((path / "config.json").read_text())
    sizes = {name: SIZES[name] for name in ("vocab_size", "intermediate_size", "num_attention_heads")}
    sizes |= {"num_key_value_heads": SIZES["num_key_value_heads"], **FAMILIES[family]}
    is_moe = "num_experts" in FAMILIES[family]
    layer = make_mtp({**(QWEN_MOE_CONFIG if is_moe else QWEN_CONFIG["text_config"]), **sizes, **config})
    tensors = load_file(path / "model.safetensors") | layer.tensors
    save_file({name: each.contiguous() for name, each in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))


OFTEN = {
    "Qwen3_5TextConfig": [*SETTINGS],
    **{family: ["draft in graphs", "tree"] for family in ("Lfm2Config", "NemotronHConfig", "KimiLinearConfig")},
}
"""One family of each recurrence; the others, and their other settings, are slow tests."""


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param(family, settings, marks=() if settings in OFTEN.get(family, ()) else pytest.mark.slow)
        for family in FAMILIES
        for settings in SETTINGS
        if family in WITH_MTP or settings != "own MTP layer"
    ],
)
def test_greedy_texts_match_those_of_transformers(family: str, settings: str, folder_of: Any) -> None:
    folder, options = folder_of(family), dict(SETTINGS[settings])
    if "draft" in options:
        options["draft"] = folder / options["draft"]
    llm = LLM(folder, device="cpu", max_model_len=48, max_num_seqs=3, **options)
    texts = [list(found.token_ids) for found in llm.generate(PROMPTS, GREEDY, progress=False)]
    stats = llm.engine.stats
    assert texts == wanted(family) and stats.lost_states == 0 and (stats.accepted > 0) == ("draft" in options)


SPECS = {
    "Qwen3NextConfig": "gated_delta, 4/2 heads, dim 8/6, convolution 4, journal 2, float32",
    "NemotronHConfig": "ssd, 4/2 heads, dim 8/6, convolution 4, journal 2, float32",
    "GraniteMoeHybridConfig": "ssd, 4/1 heads, dim 8/16, convolution 4, journal 2, float32",
    "KimiLinearConfig": "kda, 2/2 heads, dim 8/8, convolution 4, journal 2, float32",
    "OlmoHybridConfig": "gated_delta, 2/2 heads, dim 8/6, convolution 4, journal 2, float32",
    "Lfm2Config": "conv, 32 channels, convolution 3, journal 2, float32",
    "Lfm2MoeConfig": "conv, 32 channels, convolution 3, journal 2, float32",
}


def test_backend_of_states_can_be_named(folder_of: Any, request: pytest.FixtureRequest) -> None:
    class Other(TorchState):
        name, contract_version = "other_state", (1, 3)

    register()(Other)
    request.addfinalizer(lambda: unregister("other_state"))
    options = {"device": "cpu", "draft": folder_of("Qwen3_5TextConfig") / "draft"}
    chosen = LLM(folder_of("Qwen3_5TextConfig"), backend="other_state", **options).backends
    assert chosen.target["state"].name == "other_state"
    assert {each.name for name, each in chosen.target.items() if name != "state"} == {"torch_reference"}
    assert {each.name for each in chosen.draft.values()} == {"torch_reference"}
    with pytest.raises(NoBackend, match="other_state keeps recurrent states, and the model has none"):
        LLM(folder_of("Qwen3_5TextConfig"), draft_backend="other_state", **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_explain_says_whose_layers_run(family: str, folder_of: Any) -> None:
    llm = LLM(folder_of(family), device="cpu")
    ours = "target runs on this library's layers"
    assert (llm.explain().splitlines()[0] == ours) is (family in WITH_MTP)
    pinned = LLM(folder_of(family), device="cpu", target="transformers").generate(PROMPTS[:3], GREEDY, progress=False)
    assert [list(found.token_ids) for found in pinned] == wanted(family)[:3]


@pytest.mark.parametrize("family", WITH_MTP)
def test_hybrid_target_is_not_batch_invariant(family: str, folder_of: Any) -> None:
    with pytest.raises(BatchError, match="has recurrent layers, whose blocks of tokens depend on the batch"):
        LLM(folder_of(family), device="cpu", batch_invariant=True)


@pytest.mark.parametrize("family", SPECS)
def test_explain_names_the_state_group(family: str, folder_of: Any) -> None:
    llm = LLM(folder_of(family), device="cpu")
    assert llm.backends.target["state"].name == "torch_state"
    lines = [line for line in llm.explain().splitlines() if line.startswith("target [")]
    assert [line.split(": ")[-1] for line in lines] == ["torch_reference", "torch_state"]
    assert lines[1].startswith(f"target [{SPECS[family]}")


def test_changed_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("Qwen3_5TextConfig")
    layer = model.model.layers[2].linear_attn
    own = type(layer).forward
    monkeypatch.setattr(type(layer), "forward", lambda self, x, **_: own(self, x) * (1 + 0.01 * self.layer_idx))
    with pytest.raises(
        CheckpointError, match=r"layer 2 \(Qwen3_5GatedDeltaNet\) .* the recurrence .*: its outputs differ by up to"
    ):
        TransformersTarget(model)
    del layer.in_proj_z
    with pytest.raises(CheckpointError, match=r"layer 2 .*: AttributeError: .*in_proj_z"):
        TransformersTarget(model)


QWEN, NEMOTRON, LINEAR = "Qwen3_5TextConfig", "NemotronHConfig", "linear_attention"


def make_nemotron(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.NemotronHConfig(**SIZES | FAMILIES["NemotronHConfig"] | changes)
    return transformers.NemotronHForCausalLM(config)


def test_activation_other_than_silu_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"layer 0 \(NemotronHMamba2Mixer\) .*: its outputs differ by up to"):
        TransformersTarget(make_nemotron(mamba_hidden_act="gelu"))


def test_limited_steps_of_mamba2_are_served() -> None:
    assert TransformersTarget(make_nemotron(time_step_min=0.5, time_step_max=0.9)).state_groups(1)


LAYER_TYPES = {
    "wrapped elsewhere": (
        QWEN,
        [LINEAR, LINEAR, "full_attention"],
        "1 of .* computes its linear_attention in Qwen3_5Attention; those served are Qwen3NextGatedDelta",
    ),
    "an unknown type": (QWEN, [LINEAR, "compressed_attention", LINEAR], "1 of .* is of type compressed_attention"),
    "a recurrence said to attend": (QWEN, ["full_attention"] * 3, "0 is of type full_attention, but calls a recurr"),
    "attention said to be a feed-forward": (NEMOTRON, [LINEAR, "mlp", "mlp", "moe", LINEAR], "2 called .* not at all"),
    "a feed-forward said to attend": (NEMOTRON, [LINEAR, *["full_attention"] * 3, LINEAR], "1 called .* 0 times"),
}


@pytest.mark.parametrize(("family", "types", "words"), LAYER_TYPES.values(), ids=LAYER_TYPES)
def test_layer_of_another_type_is_refused(family: str, types: list[str], words: str) -> None:
    model = make_model(family)
    model.config.layer_types = types
    with pytest.raises(CheckpointError, match=f"layer {words}"):
        TransformersTarget(model)


def test_a_target_without_attention_is_refused() -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(**SIZES | FAMILIES[QWEN] | {"layer_types": [LINEAR] * 3})
    with pytest.raises(CheckpointError, match="none of its layers has attention"):
        TransformersTarget(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval())


def test_other_recurrent_layers_are_refused_by_name() -> None:
    sizes = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "attn_layer_indices": [1]}
    config = transformers.BambaConfig(**SIZES, **sizes, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"BambaForCausalLM keeps .* \(BambaMixer\); .*, Lfm2MoeShortConv"):
        TransformersTarget(transformers.BambaForCausalLM(config))


def test_lightning_attention_is_refused_by_name() -> None:
    types = ["linear_attention", "full_attention"]
    config = transformers.MiniMaxConfig(**SIZES, num_hidden_layers=2, layer_types=types, num_local_experts=2)
    words = "layer 0 of MiniMaxForCausalLM computes its linear_attention in MiniMaxLightningAttention; those served"
    with pytest.raises(CheckpointError, match=words):
        TransformersTarget(transformers.MiniMaxForCausalLM(config))


OTHER_FORWARDS = {
    "a missing part": (lambda hidden: {}["states"], "KeyError: 'states'. Use another version"),
    "outputs that differ after a block of a prompt": (
        lambda hidden: torch.zeros_like(hidden).index_fill(1, torch.arange(64, hidden.shape[1]), 9.0),
        r"its outputs differ by up to 9\S* of .* Use another version",
    ),
}


@pytest.mark.parametrize(("change", "words"), OTHER_FORWARDS.values(), ids=OTHER_FORWARDS)
def test_layer_that_computes_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    model = make_model(QWEN)
    layer = type(model.model.layers[0].linear_attn)
    own = layer.forward
    monkeypatch.setattr(layer, "forward", lambda self, hidden: own(self, hidden) + change(hidden))
    with pytest.raises(CheckpointError, match=rf"layer 0 \(Qwen3_5GatedDeltaNet\) .*{words}"):
        TransformersTarget(model)


def test_layer_of_too_large_weights_is_named() -> None:
    model = make_model(QWEN)
    with torch.no_grad():
        model.model.layers[0].linear_attn.A_log.fill_(200.0)
    with pytest.raises(CheckpointError, match=r"layer 0 .* got NaN or infinity .* A_log and dt_bias .* Restore them"):
        TransformersTarget(model)


def test_wrapped_model_serves_again_and_cannot_be_called() -> None:
    model = make_model("Qwen3_5TextConfig")
    TransformersTarget(model)
    assert len(TransformersTarget(model).state_groups(1)[0].layers) == 2
    with pytest.raises(CheckpointError, match="was called directly"):
        model(torch.tensor([[1, 2]]))
