"""vLLM over long contexts: what each arm asks of vLLM, and what is timed of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from scripts import context_arm, vllm_arm
from scripts.context_arm import ContextArm, context_arms, context_problems

DRAFTED = ContextArm(target="FLASH_ATTN", version=2, draft="FLASHINFER_IN_GRAPH", steps=7, kept=3.2, contexts=(64, 900))


class Timed:
    """An engine with room for 2,400 tokens in its cache, whose requests get 64 new tokens a step of a second."""

    cached_tokens = 2400
    rounds = 0

    def __init__(self, options: dict[str, Any], *, fills: bool) -> None:
        assert fills and options["enable_prefix_caching"]
        self.about: dict[str, Any] = {"vllm": "0.33.0"}
        self.generated: list[tuple[int, int]] = []
        self.seconds, self.counts = 0.0, list[int]()

    def generate(self, prompts: Sequence[list[int]], new_tokens: int) -> None:
        self.generated.append((len(prompts), len(prompts[0])))
        self.seconds += sum(map(len, prompts)) / 1000

    def submit(self, prompts: Sequence[list[int]], new_tokens: int) -> None:
        assert self.generated[-1] == (len(prompts), len(prompts[0])), "the prompts are in the cache"
        self.counts = [0] * len(prompts)

    def step(self) -> list[int]:
        self.seconds += 1
        self.counts = [min(each + 64, context_arm.NEW_TOKENS) for each in self.counts]
        return self.counts


def test_each_context_is_cached_before_decoding_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[Timed] = []
    monkeypatch.setattr(context_arm, "Theirs", lambda *args, **more: engines.append(Timed(*args, **more)) or engines[0])
    monkeypatch.setattr(context_arm.time, "perf_counter", lambda: engines[0].seconds)
    found = context_arm.measure(replace(DRAFTED, requests=(1, 4)), lambda: None)
    assert [(row["context"], row["requests"]) for row in found["rows"]] == [(64, 1), (64, 4), (900, 1), (900, 4)]
    assert [row.get("tokens_per_s") for row in found["rows"]] == [[64.0] * 2, [256.0] * 2, [64.0] * 2, None]
    assert [row.get("prompt_tokens_per_s") for row in found["rows"]] == [1000.0, 1000.0, 1000.0, None]
    assert found["rows"][3]["left_out"] == "4652 tokens, and the cache has room for 2400"
    assert engines[0].generated == [(4, 64), (1, 64), (4, 64), (1, 900)]


def test_more_tokens_than_are_timed_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_arm, "MOST_TOKENS", 899)
    monkeypatch.setattr(context_arm, "Theirs", Timed)
    monkeypatch.setattr(context_arm, "_speeds", lambda engine, prompts: {})
    found = context_arm.measure(replace(DRAFTED, requests=(1, 4)), lambda: None)
    reasons = [row.get("left_out") for row in found["rows"]]
    assert reasons[:2] == [None, None] and reasons[2] == "900 tokens of context; at most 899 are timed"
    monkeypatch.setattr(context_arm, "MOST_TOKENS", 900)
    found = context_arm.measure(replace(DRAFTED, requests=(1, 4)), lambda: None)
    assert [bool(row.get("left_out")) for row in found["rows"]] == [False, False, False, True]


def test_prompts_of_two_rows_share_no_beginning() -> None:
    drawn = [context_arm.contexts(DRAFTED, 64, requests, seed=64 + requests) for requests in (1, 8)]
    assert len({tuple(prompt[:8]) for prompts in drawn for prompt in prompts}) == 9
    assert drawn[1] == context_arm.contexts(replace(DRAFTED, target="other"), 64, 8, seed=72)


def test_settings_of_an_arm_reach_vllm() -> None:
    options = context_arm.engine_options(DRAFTED)
    # vLLM knows our names in attention_backend only.
    assert options["attention_backend"] == "FLASH_ATTN" and options["attention_config"] == {"flash_attn_version": 2}
    assert options["speculative_config"]["attention_backend"] == "FLASHINFER_IN_GRAPH"
    assert options["max_model_len"] >= 900 + context_arm.NEW_TOKENS + 8
    positions = [
        json.loads(Path(folder, "config.json").read_text())["max_position_embeddings"]
        for folder in (options["model"], options["speculative_config"]["model"])
    ]
    assert set(positions) == {options["max_model_len"]}
    assert context_arm.engine_options(ContextArm(target="TRITON_ATTN"))["attention_config"] == {}


@pytest.mark.parametrize(("kind", "layers"), [("", 36), ("eagle", 37), ("dflash", 41)])
def test_cache_has_room_for_largest_batch(kind: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arm = ContextArm(target="FLASH_ATTN", size="qwen3-8b", contexts=(64, 900), requests=(1, 4))
    arm = replace(arm, draft="FLASH_ATTN", kind=kind, steps=7) if kind else arm
    token = layers * 2 * 8 * 128 * 2
    room, spare = context_arm.cache_bytes(arm) // token, 4 * (context_arm.NEW_TOKENS + 2 * (1 + arm.steps) + 128)
    assert room == 4 * 900 + spare and context_arm.engine_options(arm)["kv_cache_memory_bytes"] == room * token
    monkeypatch.setattr(context_arm, "MOST_TOKENS", 1000)
    assert context_arm.cache_bytes(arm) // token == 900 + spare, "the other rows are left out"


def test_arms_cover_every_backend_at_every_head_dim() -> None:
    arms = context_arms()
    assert len({arm.name for arm in arms}) == len(arms)
    both = {(arm.target, arm.version, arm.size) for arm in arms if arm.draft == arm.target and arm.kind == "eagle"}
    for size in ("llama3-8b", "llama-1b", "dim-256"):
        names = {("FLASH_ATTN", 2), ("FLASH_ATTN", 0), ("TRITON_ATTN", 0), *((name, 0) for name in context_arm.OURS)}
        assert {(*name, size) for name in names} <= both
    plain = {(arm.target, arm.version) for arm in arms if not arm.draft}
    assert plain == {(target, version) for target, version, size in both if size == "llama3-8b"}
    assert {vllm_arm.SIZES[arm.size][4] for arm in arms} == {64, 128, 256}
    moved = {(arm.version, arm.draft) for arm in arms if arm.draft != arm.target and arm.draft}
    assert moved == {(version, name) for version in (0, 2) for name in context_arm.OURS}
    assert {arm.compiled for arm in arms if arm.target == "FLASHINFER"} == {True}, "it has no full graphs"


def test_failed_arm_is_reported() -> None:
    ended = count(1)
    found = [{"arm": {"name": f"{at}"}, "rows": rows, "exit_status": next(ended)} for at, rows in enumerate(([1], []))]
    assert context_problems(found) == ["1: ended with 2"]
