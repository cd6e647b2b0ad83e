"""Whole engines: ours runs at a small size on the CPU, and vLLM is a stand-in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks import random_model
from scripts import engine_arm, engine_runs, vllm_arm
from scripts.engine_arm import OURS, PLUGGED, VLLM, EngineArm, engine_arms, engine_problems
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
        (engine_runs, {"WARM_UP": 2}),
        (engine_arm, {"PREFILL_REQUESTS": 2, "PREFILL_TOKENS": 20}),
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
    for kept in ("kept", "decode_kept"):
        kepts = [row.get(kept, []) for row in found["rows"]]
        # Of 2 drafts, 1 is kept on average; a request of 8 tokens has about 4 rounds.
        assert (
            all(len(runs) == 2 and 0.2 < min(runs) <= max(runs) < 1.8 for runs in kepts)
            if drafted
            else kepts == [[]] * 2
        )
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
    theirs = {arm for arm in arms if arm.engine == VLLM}
    settings = {replace(arm, local_argmax=False) for arm in theirs}
    assert {replace(arm, engine=VLLM) for arm in ours} == {
        arm for arm in theirs if arm.kind in ("eagle", "qwen3.5-mtp") and not arm.local_argmax
    }
    plugged = [arm for arm in arms if arm.engine == PLUGGED]
    assert {replace(arm, engine=VLLM, models="", head="") for arm in plugged} == {
        arm for arm in settings if arm.kind != "qwen3.5-mtp"
    }
    # Ours with a head have its maxima, and so do vLLM's beside them. Its MTP has none.
    beside = {replace(arm, engine=VLLM, models="", head="", local_argmax=True) for arm in plugged if arm.head}
    assert {arm for arm in beside if arm.kind != "mtp"} <= theirs
    assert all(arm.models or arm.head for arm in plugged)


def test_profile_is_of_whole_requests(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    generated: list[tuple[int, int]] = []
    engine: Any = SimpleNamespace(generate=lambda prompts, new_tokens: generated.append((len(prompts), new_tokens)))
    monkeypatch.setattr(engine_arm, "largest_kernels", lambda call, most: {"kernels": most, "found": call()})
    found = engine_arm.profile_of_requests(engine, 3, VOCAB)
    assert found["kernels"] == engine_arm.MOST_KERNELS and generated == [(3, vllm_arm.NEW_TOKENS)]


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
            self.scheduler = SimpleNamespace(requests={}, update_from_output=lambda scheduled, found: found)
            self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=self.scheduler))

        def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
            assert name not in self.running and prompt["prompt_token_ids"]
            self.running[name] = 0

        def step(self) -> list[Any]:
            # The first request is a step ahead of the others.
            ahead = list(self.running)[:1] if not sum(self.running.values()) else list(self.running)
            verified = [*(name for name in ahead if self.running[name]), "ended", "unknown"]
            self.running |= {name: self.running[name] + 4 for name in ahead}
            going = dict.fromkeys(self.running, SimpleNamespace(is_finished=lambda: False))
            self.scheduler.requests = going | {"ended": SimpleNamespace(is_finished=lambda: True)}
            scheduled = SimpleNamespace(scheduled_spec_decode_tokens=dict.fromkeys(verified, [-1] * 7))
            assert self.scheduler.update_from_output(scheduled, "found") == "found"
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
    monkeypatch.setattr(vllm_arm, "NEW_TOKENS", 24)
    arm = EngineArm(engine=PLUGGED, steps=7, kept=3.2, requests=(2,), weights=weights, head="fp8")
    found = engine_arm.measure(arm, lambda: done.append("alone"))
    assert engine_arm.os.environ[engine_arm.DRAFT_HEAD] == "fp8"
    assert done[: done.index("generate")] == [*([] if weights else ["fill_weights"]), "alone"]
    assert "alone" not in done[done.index("generate") :]
    assert (found["vllm"], found["graph_mode"], len(found["rows"])) == ("0.33.0", "FULL", 1)
    assert found["rows"][0]["decode_kept"] == [3.0], "4 tokens a round, one of them the target's"
