"""Published targets on our own layers generate the texts that `transformers` generates, however they are drafted."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from builders import BatchError
from spec_decode.cli.main import main
from spec_decode.drafter import Strategy
from spec_decode.engine import Engine
from spec_decode.llm import LLM, SamplingParams
from spec_decode.models import CheckpointError, TransformersTarget
from spec_decode.models.decoder import DecoderTarget
from spec_decode.paged.kv_groups import KVGroup
from spec_decode.trees import DynamicTreeConfig
from tests.factories import engine_config, make_request
from tests.spec_decode.llm.test_published import write_model, write_tokenizer
from tests.spec_decode.models.test_decoder_target import KINDS, OSS_YARN, WITH_STATES, make_model
from tests.spec_decode.models.test_speculators_drafts import FOLDERS

WORDS = ["<end>", "<turn>", *(f"w{i}" for i in range(62))]
PROMPTS = [[5, 9, 33, 2], [17], [40, 41, 42, 43, 44, 45, 46, 47, 48], [3, 60]]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the folder of a kind of target with a tokenizer, or of a draft for it: itself, with another norm."""

    @cache
    def folder(kind: str, draft: bool = False) -> Path:
        if draft and kind.startswith("glm"):
            return with_prediction_layer(folder(kind))
        path, model = tmp_path_factory.mktemp(kind), make_model(kind)
        if draft:
            model.model.norm.weight.data.add_(0.2)
        else:
            write_tokenizer(path, WORDS)
        model.save_pretrained(path)
        return path

    return folder


def with_prediction_layer(folder: Path) -> Path:
    """Add a draft layer, a copy of the last one that reads the state alone, as GLM publishes it with the target."""
    path, block = folder / "model.safetensors", "model.layers.4."
    tensors = load_file(path)
    norm = tensors["model.norm.weight"]
    copied = {n.replace(".3.", ".4.", 1): t.clone() for n, t in tensors.items() if n.startswith("model.layers.3.")}
    fuse = torch.cat([torch.zeros(len(norm), len(norm)), torch.eye(len(norm))], 1)
    norms = {f"{block}{name}.weight": norm.clone() for name in ("enorm", "hnorm", "shared_head.norm")}
    save_file({**tensors, **copied, **norms, f"{block}eh_proj.weight": fuse}, path, {"format": "pt"})
    return folder


def texts(llm: LLM, prompts: list[list[int]] = PROMPTS, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(completion.token_ids) for completion in llm.generate(prompts, params, progress=False)]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in WITH_STATES])
def test_greedy_texts_match_those_of_transformers(kind: str, folder_of: Any) -> None:
    target, draft = folder_of(kind), folder_of(kind, draft=True)
    ours, library = LLM(target, device="cpu"), LLM(target, device="cpu", target="transformers")
    drafted = LLM(target, draft=draft, device="cpu", num_speculative_tokens=3)

    assert isinstance(ours.pair.target, DecoderTarget) and isinstance(library.pair.target, TransformersTarget)
    assert texts(ours) == texts(library) == texts(drafted)
    assert drafted.engine.stats.mean_accepted > 0 and ours.pair.stop_ids == library.pair.stop_ids


@pytest.mark.parametrize("strategy", [strategy.value for strategy in Strategy if strategy is not Strategy.PIECEWISE])
def test_every_strategy_generates_the_plain_text(strategy: str, folder_of: Any) -> None:
    target, draft = folder_of("llama-3"), folder_of("llama-3", draft=True)
    drafted = LLM(target, draft=draft, device="cpu", num_speculative_tokens=3, strategy=strategy)

    assert texts(drafted) == texts(LLM(target, device="cpu", target="transformers"))


@pytest.mark.parametrize(
    "settings",
    [{"tree": DynamicTreeConfig(width=2, num_tokens=6)}, {"verification": "block"}, {"batch_invariant": True}],
    ids=str,
)
def test_trees_and_verifications_generate_the_plain_text(settings: Any, folder_of: Any) -> None:
    target, draft = folder_of("qwen3"), folder_of("qwen3", draft=True)
    drafted = LLM(target, draft=draft, device="cpu", num_speculative_tokens=3, **settings)

    assert texts(drafted) == texts(LLM(target, device="cpu"))


@pytest.mark.parametrize("kind", ["llama-3", "qwen2-window", "glm-4.5", "gpt-oss", "gemma-3", "olmo-3"])
def test_batch_invariant_logprobs_do_not_depend_on_other_prompts(kind: str, folder_of: Any) -> None:
    llm = LLM(folder_of(kind), device="cpu", batch_invariant=True, max_logprobs=3)
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=3)
    together = llm.generate(PROMPTS, params, progress=False)

    for prompt, completion in zip(PROMPTS, together, strict=True):
        assert llm.generate([prompt], params, progress=False)[0].logprobs == completion.logprobs


@pytest.mark.parametrize(
    ("fields", "settings", "why"),
    [({}, {"target": "transformers"}, "you asked for it"), ({"mlp_bias": True}, {}, "mlp_bias in config.json is True")],
)
def test_batch_invariance_names_what_forbids_it(fields: Any, settings: Any, why: str, tmp_path: Path) -> None:
    write_model(tmp_path, **fields)
    write_tokenizer(tmp_path)
    with pytest.raises(BatchError, match=rf"batch_invariant is True, and {tmp_path} runs in transformers.*: {why}"):
        LLM(tmp_path, device="cpu", batch_invariant=True, **settings)


UNCOMPUTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no window": (
        "gemma-3",
        {"sliding_window": 0},
        "sliding_window counts the query itself and must be at least 1, got 0",
    ),
    "half a head": (
        "gpt-oss",
        {"rope_parameters": {**OSS_YARN, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor in config.json is 0.5, and our layers rotate whole heads only; remove or correct",
    ),
    "more than a head": (
        "phi-3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 2.5}},
        "partial_rotary_factor in config.json is 2.5, and our layers rotate whole heads only; remove or correct",
    ),
    "a factor that Llama lacks": (
        "llama-2",
        {"logit_scale": 0.5},
        "config.json has logit_scale, which our layers do not know; remove or correct",
    ),
    "a cap that Llama lacks": (
        "llama-2",
        {"final_logit_softcapping": 0.5},
        "config.json has final_logit_softcapping, which our layers do not know; remove or correct",
    ),
}


@pytest.mark.parametrize("place", [None, "transformers"])
@pytest.mark.parametrize(("kind", "fields", "message"), UNCOMPUTED.values(), ids=UNCOMPUTED)
def test_uncomputed_values_are_named(
    kind: str, fields: Any, message: str, place: str | None, folder_of: Any, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folder_of(kind), tmp_path / "target"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(CheckpointError) as refused:
        LLM(folder, device="cpu", target=place)
    assert str(folder / "config.json") in str(refused.value) and message in str(refused.value)


def test_logprobs_match_those_of_transformers(folder_of: Any) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2)
    ours, library = (
        LLM(folder_of("mistral-window"), device="cpu", max_logprobs=2, target=target).generate(PROMPTS, params)
        for target in (None, "transformers")
    )
    for found, wanted in zip(ours, library, strict=True):
        assert found.logprobs is not None and wanted.logprobs is not None
        for one, other in zip(found.logprobs, wanted.logprobs, strict=True):
            assert one == pytest.approx(other, abs=1e-4)


def test_preempted_requests_continue_their_texts(folder_of: Any) -> None:
    llm = LLM(folder_of("qwen3-window"), device="cpu")
    sizes = {"max_num_seqs": 4, "max_model_len": 64, "page_size": 4, "num_speculative_tokens": 0}
    backends = llm.backends.target
    tight = Engine(llm.pair.target, None, backends, engine_config(**sizes, num_pages=16))
    requests = [make_request(prompt, max_tokens=30) for prompt in PROMPTS]

    found = [list(generation.token_ids) for generation in tight.generate(requests)]
    assert tight.stats.preemptions > 0
    assert found == texts(llm, params=SamplingParams(max_tokens=30, ignore_eos=True))


def test_chat_and_stream_match_those_of_transformers(folder_of: Any) -> None:
    ours, library = (LLM(folder_of("smollm2"), device="cpu", target=target) for target in (None, "transformers"))
    turns = [{"role": "user", "content": "w3 w4"}]
    assert ours.pair.encode("w3 w4") == [5, 6]

    assert ours.chat(turns, GREEDY)[0].text == library.chat(turns, GREEDY)[0].text != ""
    pieces = [chunk.text for chunk in ours.stream("w3 w4", GREEDY)]
    assert "".join(pieces) == library.generate("w3 w4", GREEDY)[0].text


def test_eagle3_reads_the_same_states_of_both(tmp_path: Path) -> None:
    write_model(tmp_path, vocab_size=24, hidden_size=16, num_hidden_layers=6)
    write_tokenizer(tmp_path)
    ours, library = (
        LLM(tmp_path, draft=FOLDERS / "eagle3", device="cpu", target=target) for target in (None, "transformers")
    )
    assert ours.pair.target.aux_hidden_state_layers == library.pair.target.aux_hidden_state_layers == (1, 3, 5)
    assert texts(ours, [[2, 3]]) == texts(library, [[2, 3]])
    assert ours.engine.stats.mean_accepted == library.engine.stats.mean_accepted


def test_explain_says_where_the_target_runs_and_why(folder_of: Any, tmp_path: Path) -> None:
    assert LLM(folder_of("llama-2"), device="cpu").explain().startswith("target runs on this library's layers\n")
    pinned = LLM(folder_of("llama-2"), device="cpu", target="transformers").explain()
    assert pinned.startswith("target runs in transformers: you asked for it\n")
    write_model(tmp_path, mlp_bias=True)
    write_tokenizer(tmp_path)
    left = LLM(tmp_path, device="cpu").explain()
    assert left.startswith("target runs in transformers: mlp_bias in config.json is True, and our layers compute False")


def test_calibrated_scales_of_an_8_bit_cache_are_used_in_both_places(folder_of: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folder_of("llama-3"), tmp_path / "scaled"))
    weights = load_file(folder / "model.safetensors")
    scales = {
        f"model.layers.{layer}.self_attn.{part}_scale": torch.tensor([scale])
        for layer in range(4)
        for part, scale in (("k", 0.003), ("v", 0.002))
    }
    save_file({**weights, **scales}, folder / "model.safetensors", {"format": "pt"})
    found = [LLM(folder, device="cpu", kv_cache_dtype="fp8", target=place) for place in (None, "transformers")]
    assert all("8-bit KV cache has its checkpoint's scales" in llm.explain() for llm in found)
    assert all("kv float8_e4m3fn" in llm.explain() for llm in found) and texts(found[0]) == texts(found[1])
    (group,) = [group for group in found[0].engine.target.groups if isinstance(group, KVGroup)]
    assert all(cache.scales and cache.scales.key_floats == pytest.approx((0.003,)) for cache in group.caches.values())
    wide = LLM(folder, device="cpu")
    assert "which kv_cache_dtype fp8 uses" in wide.explain() and texts(wide) == texts(LLM(folder_of("llama-3")))
    plain = LLM(folder_of("llama-3"), device="cpu", kv_cache_dtype="fp8")
    assert "has scales of 1: its checkpoint has none" in plain.explain()


def test_unknown_place_for_a_target_is_rejected(folder_of: Any) -> None:
    with pytest.raises(BatchError, match=r"^target is 'vllm'\. Pass transformers, or leave it out"):
        LLM(folder_of("llama-2"), device="cpu", target="vllm")
    with pytest.raises(CheckpointError, match=r"^target is 'transformers', and .* holds a byte-level pair"):
        LLM("pydoc", device="cpu", target="transformers")


@pytest.mark.parametrize(("more", "place"), [([], "on this library's layers"), (["--transformers"], "in transformers")])
def test_the_command_line_says_where_the_target_runs(more: list[str], place: str, folder_of: Any) -> None:
    words = ["draft", "w3", "--target", str(folder_of("llama-2")), "--device", "cpu", "--max-tokens", "4", "--explain"]
    result = CliRunner().invoke(main, [*words, *more])

    assert result.exit_code == 0 and f"target runs {place}" in result.output, result.output


def test_float16_and_bfloat16_targets_load_in_their_dtype(folder_of: Any) -> None:
    for dtype in ("bfloat16", "float16"):
        llm = LLM(folder_of("qwen3-moe"), device="cpu", dtype=dtype)
        (only,) = llm.pair.target.layer_groups(4)
        assert only.spec.dtype is getattr(torch, dtype) and len(texts(llm)[0]) == GREEDY.max_tokens
