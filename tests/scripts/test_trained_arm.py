"""A trained model served in vLLM: what is recorded of an engine, and which differences between backends count."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import trained_arm
from scripts.trained_arm import BASE, QUESTIONS, TrainedArm, trained_agreement, trained_arms, trained_problems
from tests.stand_in_modules import install_module

OURS = "FLASHINFER_IN_GRAPH"


def arm(backend: str, kept: float = 2.0, texts: Any = ((1, 2, 3), (4, 5)), **reads: str) -> dict[str, Any]:
    """An arm's result, whose target is sure of all tokens but the second of each text."""
    row = {"kept": kept, "texts": [list(text) for text in texts], "margins": [[5.0, 0.1, 5.0], [5.0, 0.1]]}
    rows = [row | {"temperature": temperature} for temperature in (0.0, 1.0)]
    of = {"backend": backend, "linears": "", "head": "", "name": " ".join((backend, *reads.values())), **reads}
    return {"arm": of, "rows": rows, "exit_status": 0}


def said(*found: dict[str, Any]) -> list[str]:
    return trained_problems(found, trained_agreement(found))


def test_near_tie_and_chance_are_no_problems() -> None:
    other = arm(OURS, kept=2.1, texts=[(1, 9, 9), (4, 5)])
    assert said(arm(BASE), other) == []
    greedy, drawn = trained_agreement([arm(BASE), other])[2:]
    assert greedy == {
        "arm": OURS, "temperature": 0.0, "kept": 2.1, "kept_ratio": 1.05, "texts": 2, "equal_texts": 1,
        "margins": [0.1],
    }  # fmt: skip
    assert "texts" not in drawn and drawn["temperature"] == 1.0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"texts": [(9, 2, 3), (4, 5)]}, f"{OURS}, temperature 0: a text differs at a margin of 5"),
        ({"texts": [(1, 2), (4, 9)]}, None),
        ({"kept": 1.7}, f"{OURS}, temperature 1: keeps 0.85 of the drafts that {BASE} keeps"),
    ],
)
def test_other_text_or_drafts_are_problems(change: dict[str, Any], problem: str | None) -> None:
    found = said(arm(BASE), arm(OURS, **change))
    assert (problem in found) if problem else found == []


def test_drafts_in_8_bits_are_compared_with_those_in_16() -> None:
    narrow = arm(BASE, kept=1.5, head="fp8")
    assert said(narrow, arm(BASE)) == [
        f"{BASE} fp8, temperature {t}: keeps 0.75 of the drafts that {BASE} keeps" for t in (0, 1)
    ]


def test_each_way_to_read_a_draft_reaches_vllm() -> None:
    read = {}
    for each in trained_arms():
        draft = trained_arm.engine_options(each)["speculative_config"]
        read[each.backend, each.head] = (draft.get("quantization"), draft["use_local_argmax_reduction"])
    assert read[BASE, "16"] == ("attn_backends", True) and read[BASE, "fp8"] == ("attn_backends_fp8", True)
    assert read[OURS, ""] == (None, False)


def test_failed_arm_is_a_problem() -> None:
    assert said({**arm(OURS), "rows": [], "exit_status": 3}) == [f"{OURS}: ended with 3"]


def test_texts_margins_and_kept_drafts_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Llm:
        def __init__(self, **options: Any) -> None:
            assert options["attention_backend"] == OURS and not options["disable_log_stats"]
            assert options["speculative_config"]["attention_backend"] == OURS
            self.rounds = 0

        def get_metrics(self) -> list[Any]:
            counted = {"drafts": self.rounds, "accepted_tokens": 3 * self.rounds}
            named = [SimpleNamespace(name=f"vllm:spec_decode_num_{name}", value=n) for name, n in counted.items()]
            return [*named, SimpleNamespace(name="a histogram")]

        def chat(self, chats: Any, params: list[Any], *, use_tqdm: bool) -> list[Any]:
            assert [chat[0]["content"] for chat in chats] == [*QUESTIONS]
            assert len({each.seed for each in params}) == len(chats) and params[0].logprobs == 2
            self.rounds += 10 if params[0].temperature else 4
            pair = {7: SimpleNamespace(logprob=-0.5), 8: SimpleNamespace(logprob=-2.0)}
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=(7,), logprobs=[pair])])] * len(chats)

    install_module(monkeypatch, "vllm", LLM=Llm, SamplingParams=SimpleNamespace, __version__="0.33.0")
    monkeypatch.setattr(trained_arm.os, "environ", {})
    rows = trained_arm.measure(TrainedArm(backend=OURS))["rows"]
    assert [(row["temperature"], row["rounds"], row["kept"]) for row in rows] == [(0.0, 4, 3.0), (1.0, 10, 3.0)]
    assert rows[0]["texts"] == [[7]] * len(QUESTIONS) and rows[0]["margins"] == [[1.5]] * len(QUESTIONS)


def test_arms_are_vllms_default_and_ours() -> None:
    arms = trained_arms()
    assert arms[0].backend == BASE and len({each.name for each in arms}) == len(arms) == 8
    assert Path(trained_arm.vllm_arm.ROOT, arms[0].draft, "config.json").exists()
