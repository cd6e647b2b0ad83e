"""Targets of this library's layers, compared with the same checkpoints in `transformers`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from attn_backends import get
from builders import RequestTables
from spec_decode.model_api import DraftInputs, DraftModel, TargetModel, TargetStates
from spec_decode.models import TransformersTarget, load_draft
from spec_decode.models.causal_lm import load_target
from spec_decode.models.checkpoints.store import TensorStore
from spec_decode.models.decoder import DecoderTarget
from spec_decode.models.target_fields import unserved
from spec_decode.paged.attention import PagedAttention
from spec_decode.paged.kv_groups import KVGroup, build_ragged, make_group
from tests.factories import CPU, make_tables

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

TEXT = torch.randint(0, 64, (24,), generator=torch.Generator().manual_seed(5))
PAGE, WINDOW = 4, 6
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    # Large, so that attention is sharp and a wrong mask or angle shows.
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SLIDES = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
MIXTURE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2": ("Llama", {"num_key_value_heads": 4}),
    "llama-3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}}),
    "llama-biased": ("Llama", {"attention_bias": True}),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {**SLIDES, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {}),
    "qwen3-window": ("Qwen3", {**SLIDES, "attention_bias": True}),
    "qwen3-moe": ("Qwen3Moe", MIXTURE),
    "qwen3-moe-some-dense": ("Qwen3Moe", {**MIXTURE, "norm_topk_prob": False, "mlp_only_layers": [0]}),
    "qwen3-moe-every-other": ("Qwen3Moe", {**MIXTURE, "decoder_sparse_step": 2, **SLIDES}),
}


def make_model(kind: str, **changes: Any) -> Any:
    """A random fp32 model of `transformers` with its own attention, whose biases and norms do something."""
    family, fields = KINDS[kind]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **fields, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = getattr(transformers, f"{family}ForCausalLM")._from_config(config, attn_implementation="eager").eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.data.normal_()
            elif name.endswith("norm.weight"):
                parameter.data.add_(0.3 * torch.randn(parameter.shape))
    return model


@cache
def folder_of(kind: str) -> Path:
    folder = Path(mkdtemp())
    make_model(kind).save_pretrained(folder)
    return folder


def load(folder: Path, **options: Any) -> DecoderTarget:
    store = TensorStore.open(folder)
    assert unserved(store) is None
    return load_target(store, dtype=torch.float32, device=CPU, **options)


def paged(model: TargetModel | DraftModel) -> tuple[list[KVGroup], RequestTables]:
    described, backend = model.layer_groups(PAGE), get("torch_reference")
    groups = [make_group(g.name, backend, g.spec, g.layers, num_pages=64 // PAGE, device=CPU) for g in described]
    return groups, make_tables([64], page_sizes=[PAGE] * len(described))


def whole(target: TargetModel) -> tuple[torch.Tensor, TargetStates]:
    """The logits and states of the text, in one forward."""
    groups, tables = paged(target)
    batch, metadata = build_ragged(groups, tables, [len(TEXT)], [len(TEXT)])
    states = target(TEXT, batch.positions, PagedAttention(groups, metadata))
    return target.logits(states.hidden), states


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max())


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Within 1e-5 of numbers that are about 1."""
    return off(found, wanted) <= 1e-5 * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_match_transformers_own(kind: str) -> None:
    target, own = load(folder_of(kind)), make_model(kind)

    assert close(whole(target)[0], own(TEXT[None]).logits[0])
    assert target.batch_invariant and target.num_layers == 4 and target.vocab_size == 64


@pytest.mark.parametrize("kind", KINDS)
def test_states_match_those_of_transformers_targets(kind: str) -> None:
    layers = (2, 0, 4, 1)
    found = whole(load(folder_of(kind), aux_hidden_state_layers=layers))[1]
    wanted = whole(TransformersTarget(make_model(kind), aux_hidden_state_layers=layers))[1]

    assert close(found.target_hidden_states, wanted.target_hidden_states) and close(found.hidden, wanted.hidden)
    plain = whole(load(folder_of(kind)))[1]
    assert plain.target_hidden_states is plain.hidden


@pytest.mark.parametrize("layers", [(), (5,), (-1, 2)])
def test_missing_aux_layers_are_rejected_by_our_targets(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"0 to 4, got \("):
        load(folder_of("llama-2"), aux_hidden_state_layers=layers)


def test_tied_head_shares_the_embeddings_storage() -> None:
    tied, untied = load(folder_of("smollm2")), load(folder_of("llama-2"))
    assert tied.output_projection.data_ptr() == tied.embed.weight.data_ptr()
    assert untied.output_projection.data_ptr() != untied.embed.weight.data_ptr()


@pytest.mark.parametrize("kind", ["llama-3", "qwen3-moe"])
def test_draft_and_target_of_one_folder_agree(kind: str) -> None:
    target = load(folder_of(kind))
    draft = load_draft(folder_of(kind), target, dtype=torch.float32)
    logits, states = whole(target)
    groups, tables = paged(draft)
    batch, metadata = build_ragged(groups, tables, [len(TEXT)], [len(TEXT)])
    inputs = DraftInputs(TEXT, states.hidden, batch.positions, PagedAttention(groups, metadata))

    assert torch.equal(draft.logits(draft(inputs)), logits)
