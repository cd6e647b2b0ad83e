"""A trained model served in vLLM: what is recorded of an engine, and which differences between backends count."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from train_pair.prompts import HELD_OUT, TOPICS

from attn_backends.engines.vllm.names import ROUNDED
from scripts import trained_arm, vllm_figures
from scripts.engine_arm import CHANNELS
from scripts.trained_arm import (
    BASE,
    NARROW,
    NARROW_BASE,
    NEW_TOKENS,
    QUESTIONS,
    SEEDS,
    STEPS,
    TrainedArm,
    trained_agreement,
    trained_arms,
    trained_problems,
)
from spec_decode.environment import environment
from tests.stand_in_modules import install_module

OURS = "FLASHINFER_IN_GRAPH"
KEPT, DRAWN_KEPT = 0.72, 0.33
"""Probability that a draft is kept, which gives 1.9 drafts a round of greedy text, and 0.5 of drawn text."""


def written(text_chances: Sequence[float], keeps: float) -> list[int]:
    """Return the tokens of each round of a text of so many tokens, whose drafts are right where the chance is below
    `keeps`."""
    rounds, at = [1], 1
    while at < len(text_chances):
        kept = 0
        while kept < STEPS and at + kept < len(text_chances) - 1 and text_chances[at + kept] < keeps:
            kept += 1
        rounds.append(kept + 1)
        at += kept + 1
    return rounds


def chances(length: int, seed: int) -> list[float]:
    return [random.Random(1000 * seed + at).random() for at in range(length)]


def nearly(text_chances: Sequence[float], seed: int) -> list[float]:
    """The chances of the same text on another kernel."""
    rng = random.Random(seed)
    return [each + rng.gauss(0, 0.01) for each in text_chances]


GREEDY = [chances(150, seed) for seed in range(32)]
DRAWN = [chances(120, 100 + seed) for seed in range(256)]


def arm(
    backend: str,
    greedy: Sequence[Sequence[int]] | None = None,
    drawn: Sequence[Sequence[int]] | None = None,
    texts: Any = None,
    margins: Any = None,
    **reads: str,
) -> dict[str, Any]:
    """An arm's result: the tokens of each round, greedy texts, and how sure the target is of them."""
    both = {0.0: greedy or [written(each, KEPT) for each in GREEDY]}
    both[1.0] = drawn or [written(each, DRAWN_KEPT) for each in DRAWN]
    rows: list[dict[str, Any]] = []
    for temperature, round_tokens in both.items():
        rounds = sum(len(each) - 1 for each in round_tokens)
        kept = sum(sum(each[1:]) for each in round_tokens) / max(rounds, 1) - 1
        rows.append({"temperature": temperature, "kept": round(kept, 3), "rounds": rounds, "counted_rounds": rounds})
        rows[-1] |= {"round_tokens": round_tokens}
    rows[0]["texts"] = texts or [list(range(sum(each))) for each in both[0.0]]
    rows[0]["margins"] = margins or [[5.0] * len(text) for text in rows[0]["texts"]]
    of = dict.fromkeys(("linears", "head", "cache", "draft_cache"), "") | reads
    of |= {"backend": backend, "name": " ".join((backend, *reads.values()))}
    return {"arm": of, "rows": rows, "exit_status": 0}


def said(*found: dict[str, Any]) -> list[str]:
    return trained_problems(found, trained_agreement(found))


def test_same_acceptance_on_another_kernel_is_no_problem() -> None:
    other = arm(OURS, *([written(nearly(each, 7), kept) for each in texts] for texts, kept in LEVELS))
    assert said(arm(BASE), other) == []
    greedy, drawn = trained_agreement([arm(BASE), other])
    assert greedy["rounds_ratio"] == pytest.approx(1, abs=0.02) and 0 < greedy["error"] < 0.02
    assert greedy["shared_tokens"] == 32 * 150 and (greedy["texts"], greedy["equal_texts"]) == (32, 32)
    assert drawn["kept_ratio"] == pytest.approx(1, abs=0.03) and 0 < drawn["finds_loss"] < 0.1
    assert (drawn["arm"], drawn["against"], drawn["temperature"]) == (OURS, BASE, 1.0) and "texts" not in drawn


LEVELS = ((GREEDY, KEPT), (DRAWN, DRAWN_KEPT))


def test_draft_that_keeps_15_percent_less_is_a_problem() -> None:
    # 1.6 and 0.42 drafts a round.
    worse = arm(OURS, [written(each, 0.665) for each in GREEDY], [written(each, 0.295) for each in DRAWN])
    base = arm(BASE)
    for one, other in zip(base["rows"], worse["rows"], strict=True):
        assert other["kept"] / one["kept"] == pytest.approx(0.85, abs=0.02)
    greedy, drawn = said(base, worse)
    assert re.fullmatch(f"{OURS}, temperature 0: 1.(09|1)[0-9]* times the rounds of {BASE} for the same tokens", greedy)
    assert drawn.startswith(f"{OURS}, temperature 1: keeps 0.8") and f"{BASE} keeps, with a standard error" in drawn


ALARM = (
    (104, 118, 23, 0.0), (192, 192, 40, 0.125), (192, 192, 192, 9.0), (192, 192, 192, 9.0), (113, 113, 113, 9.0),
    (192, 148, 9, 0.0), (192, 192, 51, 0.0), (192, 192, 192, 9.0), (192, 192, 103, 0.0), (192, 192, 31, 0.0),
    (176, 145, 27, 0.125), (192, 192, 30, 0.125),
)  # fmt: skip
"""Tokens of greedy texts on both sides, with how many they begin alike, and the margin after those: a first run on a
GPU."""


def test_texts_that_part_at_ties_and_then_keep_other_drafts_are_no_problem() -> None:
    greedy: tuple[list[list[int]], list[list[int]]] = ([], [])
    drawn: tuple[list[list[int]], list[list[int]]] = ([], [])
    texts, margins = [], []
    for seed, (length, other, same, margin) in enumerate(ALARM):
        begun, rng = chances(same, seed), random.Random(seed)
        rest = [each + 0.09 for each in chances(other - same, 60 + seed)]
        greedy[0].append(written(begun + chances(length - same, 30 + seed), KEPT))
        greedy[1].append(written(nearly(begun, seed) + rest, KEPT))
        texts.append([*range(same), *range(1000, 1000 + other - same)])
        margins.append([margin if at == same else 5.0 for at in range(length)])
        # Texts that are easy and hard to draft: what each keeps is far from the mean.
        for side, lengths, mean in zip(drawn, (110, 150), (0.33, 0.29), strict=True):
            side.append(written(chances(lengths, 90 + seed + lengths), max(0.05, rng.gauss(mean, 0.15))))
    base = arm(BASE, greedy[0], drawn[0], margins=margins)
    found = [base, arm(OURS, greedy[1], drawn[1], texts=texts)]
    kept = [row["kept"] / other["kept"] for row, other in zip(found[1]["rows"], base["rows"], strict=True)]
    assert kept == pytest.approx([0.913, 0.843], abs=0.04), "as on the GPU"
    assert said(*found) == []
    alike, _ = trained_agreement(found)
    assert alike["shared_tokens"] == 1003 and alike["equal_texts"] == 4 and max(alike["margins"]) == 0.125


def test_rounds_are_counted_over_shared_tokens_in_part() -> None:
    # Both texts part after 6 tokens: 1 of the prompt, then rounds of 3 and of 2 of 4, or of 2, 2 and 1 of 5.
    texts = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2]]
    base = arm(BASE, [[1, 3, 4], [1, 1]], texts=texts, margins=[[9.0] * 6 + [0.1, 9.0], [9.0, 9.0]])
    other = arm(OURS, [[1, 2, 2, 5], [1, 1]], texts=[[1, 2, 3, 4, 5, 6, 9, 9, 9, 9], [1, 2]])
    greedy, _ = trained_agreement([base, other])
    assert greedy["rounds_ratio"] == pytest.approx((1 + 1 + 0.2 + 1) / (1 + 0.5 + 1), abs=1e-4)
    assert greedy["shared_tokens"] == 8 and greedy["margins"] == [0.1]
    # Each text's rounds less the ratio times the base's, over the base's mean; two of them.
    assert greedy["error"] == pytest.approx((2.2 - 1.28 * 1.5) / 1.25, abs=1e-3)


@pytest.mark.parametrize(("rounds", "problem"), [(104, False), (106, True), (90, False)])
def test_more_rounds_for_the_same_tokens_are_a_problem(rounds: int, problem: bool) -> None:
    base = [[1, *[2] * 100]] * 32
    ones = 2 * rounds - 200 if rounds >= 100 else 0
    other = [[1, *[2] * (100 - ones // 2), *[1] * ones]] * 32 if ones else [[1, *[3] * 20, *[2] * 70]] * 32
    assert all(len(each) - 1 == rounds and sum(each) == 201 for each in other)
    found = [arm(BASE, base), arm(OURS, other)]
    expected = [f"{OURS}, temperature 0: {rounds / 100:g} times the rounds of {BASE} for the same tokens"]
    assert said(*found) == expected * problem


def drawn_pair(differences: Sequence[int]) -> list[dict[str, Any]]:
    """Arms of texts of 100 rounds that keep 100 drafts, and that many more on the other side."""
    sides = (
        [[1, *[1] * (50 - more), *[3] * (50 + more)] for more in each] for each in ([0] * len(differences), differences)
    )
    return [arm(name, drawn=side) for name, side in zip((BASE, OURS), sides, strict=True)]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("spread", "problem"), [(9, True), (11, False)])
def test_drawn_texts_may_differ_by_three_standard_errors(sign: int, spread: int, problem: bool) -> None:
    # Of 101 texts, differences of mean 3 and standard deviation `spread`: an error of a tenth of that.
    differences = [sign * (3 + each) for each in [spread, -spread] * 50] + [sign * 3]
    found = drawn_pair(differences)
    _, drawn = trained_agreement(found)
    assert drawn["kept_ratio"] == pytest.approx(1 + sign * 0.06, abs=1e-4)
    assert drawn["error"] == pytest.approx(2 * spread / 100 / 101**0.5, rel=1e-2)
    assert drawn["finds_loss"] == pytest.approx(4 * drawn["error"], abs=1e-3)
    assert bool(said(*found)) is problem


def test_questions_may_differ_more_than_arms() -> None:
    # 0 to 2 drafts a round by question, and 0.02 less each on the other side.
    base = [[1, *[1] * (100 - each), *[3] * each] for each in range(1, 100)]
    other = [[1, *[1] * (101 - each), *[3] * (each - 1)] for each in range(1, 100)]
    [problem] = said(arm(BASE, drawn=base), arm(OURS, drawn=other))
    assert problem.startswith(
        f"{OURS}, temperature 1: keeps 0.98 of the drafts that {BASE} keeps, with a standard error"
    )


@pytest.mark.parametrize(("margin", "problem"), [(0.25, False), (0.375, True)])
def test_text_may_part_at_a_near_tie(margin: float, problem: bool) -> None:
    texts = [list(range(150)) for _ in GREEDY]
    texts[3] = [*range(149), 1000]
    margins = [[9.0] * 149 + [margin] for _ in GREEDY]
    found = said(arm(BASE, margins=margins), arm(OURS, texts=texts))
    assert found == [f"{OURS}, temperature 0: a text differs at a margin of 0.375"] * problem


def test_text_that_ends_early_is_judged_by_its_end() -> None:
    margins = [[9.0] * 149 + [0.5] for _ in GREEDY]
    longer = [[*range(151)], *[list(range(150)) for _ in GREEDY[1:]]]
    assert said(arm(BASE, margins=margins), arm(OURS, texts=longer)) == [
        f"{OURS}, temperature 0: a text differs at a margin of 0.5"
    ]


def test_too_few_shared_tokens_are_a_problem() -> None:
    apart = [[0, 1, 2, *range(1000, 1147)] for _ in GREEDY]
    margins = [[0.1] * 150 for _ in GREEDY]
    few = said(arm(BASE, margins=margins), arm(OURS, [written(each, 0.5) for each in GREEDY], texts=apart))
    assert few == [f"{OURS}, temperature 0: shares 96 tokens with {BASE}, too few to compare rounds"]
    none = arm(OURS, texts=[range(1000, 1150)] * 32)
    assert trained_agreement([arm(BASE), none])[0]["rounds_ratio"] is None
    assert f"{OURS}, temperature 0: shares 0 tokens with {BASE}, too few to compare rounds" in said(arm(BASE), none)


def test_draft_that_is_never_kept_is_a_problem() -> None:
    for nothing in ([[1] * 120] * 256, [[1]] * 256):
        assert said(arm(BASE, drawn=nothing), arm(OURS)) == [f"{OURS}, temperature 1: {BASE} keeps no drafts"]
        [problem] = said(arm(BASE), arm(OURS, drawn=nothing))
        assert problem.startswith(f"{OURS}, temperature 1: keeps 0 of the drafts")


def test_draft_in_8_bits_is_judged_by_vllms_own() -> None:
    worse = [written(each, 0.6) for each in GREEDY]
    theirs = arm(BASE, worse, linears=CHANNELS)
    ours = arm(BASE, worse, linears=ROUNDED, head="fp8")
    assert said(ours, theirs, arm(BASE)) == []
    rows = [row for row in trained_agreement([ours, theirs, arm(BASE)]) if not row["temperature"]]
    compared = {(row["arm"], row["against"]): row for row in rows}
    assert set(compared) == {(ours["arm"]["name"], theirs["arm"]["name"]), (theirs["arm"]["name"], BASE)}
    assert compared[theirs["arm"]["name"], BASE]["rounds_ratio"] > 1.05
    [problem] = said(arm(BASE, linears=ROUNDED, head="fp8", greedy=worse), arm(BASE, linears=CHANNELS), arm(BASE))
    assert f"times the rounds of {BASE} {CHANNELS}" in problem


def test_8_bit_caches_are_judged_by_vllms_own() -> None:
    worse = [written(each, 0.6) for each in GREEDY]
    theirs, rounded = (arm(name, worse, cache="fp8") for name in (NARROW_BASE, BASE))
    ours = [arm(NARROW, worse, cache="fp8"), arm(NARROW, worse, cache="fp8", draft_cache="bfloat16")]
    assert said(*ours, theirs, rounded, arm(BASE)) == []
    rows = [row for row in trained_agreement([*ours, theirs, rounded, arm(BASE)]) if not row["temperature"]]
    narrow, own = f"{NARROW_BASE} fp8", f"{NARROW} fp8"
    assert {row["arm"]: (row["against"], row["judged"], row["parts_at_ties"]) for row in rows} == {
        own: (narrow, True, False), f"{own} bfloat16": (own, True, True),
        narrow: (BASE, False, False), f"{BASE} fp8": (BASE, False, False),
    }  # fmt: skip
    [problem] = said(arm(NARROW, worse, cache="fp8"), arm(NARROW_BASE, cache="fp8"), arm(BASE))
    assert f"times the rounds of {narrow}" in problem


def test_texts_over_8_bit_caches_may_part_anywhere() -> None:
    parted = [[*range(sum(each) - 1), -1] for each in (written(each, KEPT) for each in GREEDY)]
    narrow = [arm(NARROW_BASE, cache="fp8"), arm(NARROW, texts=parted, cache="fp8")]
    assert said(arm(BASE), *narrow) == []
    apart = said(arm(BASE), *narrow, arm(NARROW, cache="fp8", draft_cache="bfloat16"))
    assert len(apart) == len(GREEDY) and "a text differs at a margin of 5" in apart[0]


def test_arm_whose_peer_is_missing_is_not_compared() -> None:
    assert trained_agreement([arm(OURS)]) == [] and said(arm(OURS)) == []


def test_merged_rounds_are_a_problem() -> None:
    merged = arm(BASE)
    merged["rows"][1]["counted_rounds"] += 1
    rounds = merged["rows"][1]["rounds"]
    assert said(merged) == [f"{BASE}: outputs of {rounds} rounds, but vLLM counts {rounds + 1}"]


def test_failed_arm_is_a_problem() -> None:
    assert said({**arm(OURS), "rows": [], "exit_status": 3}) == [f"{OURS}: ended with 3"]


def test_each_way_to_read_a_draft_reaches_vllm() -> None:
    read = {}
    for each in trained_arms():
        draft = trained_arm.engine_options(each)["speculative_config"]
        read[each.backend, each.head] = (draft.get("quantization"), draft["use_local_argmax_reduction"])
    assert read[BASE, "16"] == ("attn_backends", True) and read[BASE, "fp8"] == ("attn_backends_fp8", True)
    assert read[OURS, ""] == (None, False)


def test_each_cache_reaches_vllm() -> None:
    caches = []
    for each in trained_arms():
        options = trained_arm.engine_options(each)
        draft = options["speculative_config"].get("kv_cache_dtype", "as the target's")
        caches += [(each.backend, options["kv_cache_dtype"], draft)] if each.cache else []
        assert each.cache or (options["kv_cache_dtype"], draft) == ("auto", "as the target's")
    assert caches == [(name, "fp8", "as the target's") for name in (NARROW_BASE, NARROW, BASE)] + [
        (NARROW, "fp8", "bfloat16")
    ]


def test_questions_are_about_no_topic_of_the_training_texts() -> None:
    topics = [topic.strip() for topic in TOPICS.replace("\n", "|").split("|") if topic.strip()]
    trained_on = [topic for at, topic in enumerate(topics) if at % HELD_OUT]
    asked = [(topic, text) for topic in trained_on for text in QUESTIONS if re.search(rf"\b{topic}\b", text, re.I)]
    assert asked == [] and len(trained_on) > 150
    assert len(set(QUESTIONS)) == len(QUESTIONS) >= 24 and SEEDS[1.0] >= 2


class Engine:
    """vLLM's: it writes two of a request's tokens a step, after the one of its prompt, and counts three drafts kept
    a round."""

    def __init__(self) -> None:
        self.steps: dict[str, int] = {}
        self.params: dict[str, Any] = {}
        self.rounds = 0

    def add_request(self, request: str, prompt: Any, params: Any) -> None:
        assert prompt == {"prompt_token_ids": list(prompt["prompt_token_ids"])} and request not in self.params
        self.steps[request], self.params[request] = 0, params

    def has_unfinished_requests(self) -> bool:
        return bool(self.steps)

    def step(self) -> list[Any]:
        # All but the first of the requests, as when a step has room for no more of them.
        running = list(self.steps)[-20:]
        outputs = []
        for request in running:
            self.rounds += self.steps[request] > 0
            self.steps[request] += 1
            tokens = [7] * (2 * self.steps[request] - 1)
            margins = [{7: SimpleNamespace(logprob=-0.5), 8: SimpleNamespace(logprob=-2.0)}] * len(tokens)
            logprobs = margins if self.params[request].logprobs else None
            output = SimpleNamespace(token_ids=tuple(tokens), logprobs=logprobs)
            outputs.append(SimpleNamespace(request_id=request, outputs=[output]))
            if self.steps[request] == 3:
                del self.steps[request]
        return outputs


class Tokenizer:
    def apply_chat_template(self, chat: Any, *, add_generation_prompt: bool, tokenize: bool) -> str:
        assert add_generation_prompt and not tokenize and [each["role"] for each in chat] == ["user"]
        return "<user>" + chat[0]["content"]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert text.startswith("<user>") and not add_special_tokens
        return [QUESTIONS.index(text.removeprefix("<user>"))]


def test_rounds_texts_and_margins_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()

    class Llm:
        def __init__(self, **options: Any) -> None:
            assert options["attention_backend"] == OURS and not options["disable_log_stats"]
            assert options["speculative_config"]["attention_backend"] == OURS
            self.llm_engine = engine

        def get_tokenizer(self) -> Tokenizer:
            return Tokenizer()

        def get_metrics(self) -> list[Any]:
            counted = {"drafts": engine.rounds, "accepted_tokens": 3 * engine.rounds}
            named = [SimpleNamespace(name=f"vllm:spec_decode_num_{name}", value=n) for name, n in counted.items()]
            return [*named, SimpleNamespace(name="a histogram")]

    install_module(monkeypatch, "vllm", LLM=Llm, SamplingParams=SimpleNamespace, __version__="0.33.0")
    monkeypatch.setattr(trained_arm.os, "environ", {})
    greedy, drawn = trained_arm.measure(TrainedArm(backend=OURS), lambda: None)["rows"]
    assert (greedy["temperature"], drawn["temperature"]) == (0.0, 1.0)
    drawn_texts = SEEDS[1.0] * len(QUESTIONS)
    for row, requests in ((greedy, len(QUESTIONS)), (drawn, drawn_texts)):
        assert row["requests"] == requests and row["kept"] == 3.0
        assert row["round_tokens"] == [[1, 2, 2]] * requests
        assert row["rounds"] == row["counted_rounds"] == 2 * requests
    assert greedy["texts"] == [[7] * 5] * len(QUESTIONS) and greedy["margins"] == [[1.5] * 5] * len(QUESTIONS)
    assert "texts" not in drawn
    params = list(engine.params.values())
    assert all(each.max_tokens == NEW_TOKENS for each in params)
    assert [each.seed for each in params if each.temperature] == list(range(drawn_texts)), (
        "every text has noise of its own"
    )
    assert {each.logprobs for each in params if not each.temperature} == {2}


def test_arms_are_vllms_default_and_ours_and_share_gpus() -> None:
    arms = trained_arms()
    assert arms[0].backend == BASE and len({each.name for each in arms}) == len(arms) == 12
    assert not any(each.is_timed for each in arms)
    assert Path(trained_arm.vllm_arm.ROOT, arms[0].draft, "config.json").exists()


def test_report_holds_the_comparison_and_no_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written_to, found = {}, [arm(BASE), arm(OURS)]
    monkeypatch.setattr(vllm_figures.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(vllm_figures, "environment", lambda device: environment(torch.device("cpu")))
    monkeypatch.setattr(vllm_figures, "run_all", lambda *args, **options: (found, []))
    monkeypatch.setattr(vllm_figures, "write_report", lambda *args, **content: written_to.update(content))
    monkeypatch.setattr("sys.argv", ["", "--trained", "--json", "report.json", "--kept", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        vllm_figures.main()
    assert not ended.value.code and len(written_to["agreement"]) == 2
    kept = {"temperature", "kept", "rounds", "counted_rounds"}
    assert all(set(row) == kept for each in written_to["arms"] for row in each["rows"])
