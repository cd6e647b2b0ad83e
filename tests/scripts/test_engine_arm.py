"""Whole engines: ours runs at a small size on the CPU, and vLLM is a stand-in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks import random_model
from scripts import engine_arm, vllm_arm
from scripts.engine_arm import OURS, PLUGGED, VLLM, EngineArm, decoding_speed, engine_arms, engine_problems
from spec_decode.models.checkpoints.store import TensorStore
from tests.stand_in_modules import install_module

VOCAB = 128


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arms of the size llama3-8b are small."""
    monkeypatch.setitem(vllm_arm.SIZES, "llama3-8b", (64, 96, 4, 2, 16, VOCAB, 2))
    monkeypatch.setitem(vllm_arm.SIZES, "qwen3.5", (64, 96, 4, 2, 16, VOCAB, 4))
    sizes = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
    family = vllm_arm.FAMILIES["qwen3_5_text"] | sizes | {"linear_num_value_heads": 4}
    monkeypatch.setitem(vllm_arm.FAMILIES, "qwen3_5_text", family)
    for module, numbers in (
        (vllm_arm, {"PROMPT": 80, "NEW_TOKENS": 8, "REPEATS": 2}),
        (engine_arm, {"WARM_UP": 2, "PREFILL_REQUESTS": 2, "PREFILL_TOKENS": 20}),
    ):
        for name, number in numbers.items():
            monkeypatch.setattr(module, name, number)


@pytest.mark.parametrize(
    "drafted",
    [{}, {"steps": 2, "kept": 1.0}, {"steps": 2, "kept": 1.0, "size": "qwen3.5", "kind": "qwen3.5-mtp"}],
    ids=["plain", "drafted", "hybrid"],
)
def test_our_arm_runs_llm_of_folder(drafted: dict[str, Any], tiny: None) -> None:
    found = engine_arm.measure(EngineArm(engine=OURS, requests=(1, 2), **drafted), lambda: None)
    assert [row["requests"] for row in found["rows"]] == [1, 2]
    speeds = [row[kind] for row in found["rows"] for kind in ("tokens_per_s", "decode_tokens_per_s")]
    assert all(len(runs) == 2 and min(runs) > 0 for runs in [*speeds, found["prefill"]["tokens_per_s"]])
    assert (found["prefill"]["requests"], found["prefill"]["prompt_tokens"]) == (2, 40)
    assert ("no draft: plain decoding" in found["explain"]) is not bool(drafted)
    arm = {"engine": OURS, "name": "x", "size": drafted.get("size", "llama3-8b")}
    assert engine_problems([{**found, "arm": arm}]) == []


def test_every_tensor_of_random_model_differs(tiny: None, tmp_path: Path) -> None:
    store = TensorStore.open(engine_arm.write_model(tmp_path / "model", "llama3-8b"))
    tensors = [store.peek(name) for name in store.names()]
    first = {tuple(tensor.flatten()[:8].tolist()) for tensor in tensors if tensor.dim() == 2}
    assert len(first) == sum(tensor.dim() == 2 for tensor in tensors) == 2 + 2 * 7
    assert (tmp_path / "model/pytorch_model.bin").stat().st_size < 2 * (random_model._SPARE + 64 * 1000)


def test_every_token_of_random_model_has_text(tiny: None, tmp_path: Path) -> None:
    """LLM decodes the texts that are timed. Tokens without text take it longer than a published tokenizer's."""
    folder = engine_arm.write_model(tmp_path / "model", "llama3-8b")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    last = vllm_arm.SIZES["llama3-8b"][5] - 1
    assert tokenizer.decode([0, last]) == f"word0 word{last}"


def test_settings_of_an_arm_reach_both_engines(tiny: None, tmp_path: Path) -> None:
    arm = EngineArm(engine=OURS, steps=7, kept=3.2, weights=True, draft_weights=True)
    ours, theirs = engine_arm.llm_options(arm, tmp_path), engine_arm.vllm_options(replace(arm, local_argmax=True))
    assert (ours["weights"], ours["draft_weights"], ours["verification"]) == ("fp8", "fp8", "synthetic:3.2")
    assert (ours["num_speculative_tokens"], ours["max_num_seqs"]) == (7, theirs["max_num_seqs"])
    assert theirs["quantization"] == "fp8_per_channel"
    assert theirs["speculative_config"].items() >= {
        "num_speculative_tokens": 7, "quantization": "fp8_per_channel", "draft_lm_head_quantization": "fp8",
        "use_local_argmax_reduction": True, "synthetic_acceptance_length": 4.2,
    }.items()  # fmt: skip
    for arm in engine_arms():
        draft = engine_arm.vllm_options(arm).get("speculative_config", {})
        rounds_head = arm.draft_weights and not arm.head and arm.kind not in ("eagle3", "dflash")
        assert ("draft_lm_head_quantization" in draft) is rounds_head
        assert ("quantization" in draft) is (arm.kind != "mtp" and (arm.draft_weights or "draft" in arm.models))
    plain = engine_arm.vllm_options(EngineArm(engine=VLLM))
    assert not {"quantization", "speculative_config"} & plain.keys()
    assert 2 * plain["max_num_seqs"] >= 512, "graphs as by its default"


def test_each_of_our_arms_has_one_of_vllm() -> None:
    arms = engine_arms()
    ours = [arm for arm in arms if arm.engine == OURS]
    assert len({arm.name for arm in arms}) == len(arms) and len(ours) == 8
    theirs = {arm for arm in arms if arm.engine == VLLM and not arm.local_argmax}
    compared = {arm for arm in theirs if arm.kind in ("eagle", "qwen3.5-mtp")}
    assert {replace(arm, engine=VLLM) for arm in ours} == compared
    plugged = [arm for arm in arms if arm.engine == PLUGGED]
    assert {replace(arm, engine=VLLM, models="", head="") for arm in plugged} == {
        arm for arm in theirs if arm.kind not in ("qwen3.5-mtp", "eagle3")
    } | {replace(arm, local_argmax=False) for arm in arms if arm.kind == "eagle3" and arm.engine == VLLM}
    assert all(arm.models or arm.head for arm in plugged)


def test_profile_is_of_whole_requests(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    generated: list[tuple[int, int]] = []
    engine: Any = SimpleNamespace(generate=lambda prompts, new_tokens: generated.append((len(prompts), new_tokens)))
    monkeypatch.setattr(engine_arm, "largest_kernels", lambda call, most: {"kernels": most, "found": call()})
    found = engine_arm.profile_of_requests(engine, 3, VOCAB)
    assert found["kernels"] == engine_arm.MOST_KERNELS and generated == [(3, vllm_arm.NEW_TOKENS)]


@dataclass
class Scripted:
    """An engine whose requests have these new tokens after each step; a step takes a second."""

    steps: Iterator[list[int]]
    seconds: float = 0.0

    def submit(self, prompts: Sequence[list[int]], new_tokens: int) -> None: ...

    def step(self) -> list[int]:
        self.seconds += 1
        return next(self.steps)


def test_decoding_speed_spans_steps_in_which_all_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [[0, 0], [40, 0], [80, 31], [120, 32], [180, 90], [256, 140], [256, 200], [256, 256]]
    engine: Any = Scripted(iter(counts))
    monkeypatch.setattr(engine_arm.time, "perf_counter", lambda: engine.seconds)
    assert decoding_speed(engine, [[1], [2]], 256) == (256 + 140 - 120 - 32) / 2
    assert next(engine.steps, None) is None, "the engine is idle again"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rows": [], "exit_status": 9}, ["x: ended with 9"]),
        ({"explain": ["target runs in transformers: why"]}, ["x: target runs in transformers: why"]),
    ],
)
def test_problem_of_engine_is_reported(change: dict[str, Any], says: list[str]) -> None:
    found = {"arm": {"engine": OURS, "name": "x"}, "rows": [1], "explain": ["target runs on this library's layers"]}
    assert engine_problems([found]) == [] and engine_problems([found | change]) == says


@pytest.mark.parametrize("weights", [False, True])
def test_vllm_is_stepped_and_filled(weights: bool, tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Core:
        vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode="FULL"))

        def __init__(self) -> None:
            self.running: dict[str, int] = {}

        def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
            assert name not in self.running and prompt["prompt_token_ids"]
            self.running[name] = 0

        def step(self) -> list[Any]:
            # The first request is a step ahead of the others.
            ahead = list(self.running)[:1] if not sum(self.running.values()) else list(self.running)
            self.running |= {name: self.running[name] + 4 for name in ahead}
            return [SimpleNamespace(request_id=name, outputs=[Tokens(self.running[name])]) for name in ahead]

    class Tokens:
        def __init__(self, count: int) -> None:
            self.token_ids = [0] * count

    class Theirs:
        def __init__(self, **options: Any) -> None:
            self.llm_engine = Core()

        def generate(self, prompts: Sequence[Any], params: Any, *, use_tqdm: bool) -> None:
            done.append("generate")
            self.llm_engine.running.clear()

        def collective_rpc(self, name: str, args: tuple[int, ...]) -> None:
            done.append(name)

    install_module(monkeypatch, "vllm", LLM=Theirs, SamplingParams=SimpleNamespace, __version__="0.33.0")
    monkeypatch.setattr(engine_arm.os, "environ", {})
    monkeypatch.setattr(vllm_arm, "REPEATS", 1)
    arm = EngineArm(engine=PLUGGED, requests=(2,), weights=weights, head="fp8")
    found = engine_arm.measure(arm, lambda: done.append("alone"))
    assert engine_arm.os.environ[engine_arm.DRAFT_HEAD] == "fp8"
    assert done[: done.index("generate")] == [*([] if weights else ["fill_weights"]), "alone"]
    assert "alone" not in done[done.index("generate") :]
    assert (found["vllm"], found["graph_mode"], len(found["rows"])) == ("0.33.0", "FULL", 1)
