"""Drafting with the shipped pair agrees in every graph mode and strategy, on every backend that supports it.

For 2, 3, 4 and 5 draft tokens, in every graph mode and strategy, greedy and at temperature 1, with fixed seeds: the
draft tokens kept in each round and the final text must equal those of eager drafting. Runs in float32 if the backend
supports it, otherwise in bfloat16, where greedy text may differ from plain decoding if two candidates are within
rounding; and in bfloat16 with batch invariance if the backend has it. With batch invariance and in float32, a greedy
text must equal plain decoding's, and every text that of the prompt alone. Each draft and backend has its own process.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import msgspec
import pytest
import torch

from attn_backends import registry
from attn_backends.triton_paged import TritonPaged
from spec_decode.drafter import Strategy, StrategyError
from spec_decode.engine import Engine, Request
from spec_decode.llm.backends import Backends, backends_named
from spec_decode.llm.byte_tokenizer import encode
from spec_decode.llm.pair import Pair, load_byte_pair
from spec_decode.matrix.sources import AGREEMENT_SCHEMA, AgreementRow
from spec_decode.models import SHIPPED_PAIR, draft_names
from spec_decode.paged import GraphMode
from spec_decode.testing.held_out_text import held_out_prompts
from tests.factories import engine_config, make_request

PAGE_SIZE = 16
JOBS = 10
WAYS = {
    strategy: [mode for mode in GraphMode if (mode is GraphMode.NONE) == (strategy is Strategy.EAGER)]
    for strategy in Strategy
}
TEMPERATURES = (0.0, 1.0)
DRAFT_TOKENS = (2, 3, 4, 5)
INVARIANT_DRAFT_TOKENS = (3,)
PROMPTS, PROMPT_BYTES, NEW_TOKENS, SEED = 6, 64, 48, 7

Texts = list[tuple[list[int], list[int]]]
"""For every prompt the new tokens, and the draft tokens kept in each round."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A pair on its backends, in whose engines every text that is compared is made."""

    pair: Pair
    backends: Backends
    batch_invariant: bool

    def engine(self, count: int, mode: GraphMode = GraphMode.NONE, strategy: Strategy | None = None) -> Engine:
        """An engine that drafts `count` tokens a round, none for plain decoding."""
        config = engine_config(
            num_speculative_tokens=count,
            max_num_seqs=4,
            max_model_len=max(request.max_len for request in requests_at(0.0)),
            page_size=PAGE_SIZE,
            graph_mode=mode,
            strategy=strategy,
            batch_invariant=self.batch_invariant,
        )
        return Engine(
            self.pair.target, self.pair.draft, self.backends.target, config, draft_backend=self.backends.draft
        )

    @property
    def exact(self) -> bool:
        """Whether no rounding can excuse another text."""
        return self.batch_invariant or next(self.pair.target.parameters()).dtype == torch.float32


def requests_at(temperature: float) -> list[Request]:
    """The prompts, each with a seed of its own."""
    return [
        make_request(prompt=encode(text), max_tokens=NEW_TOKENS, temperature=temperature, seed=SEED + index)
        for index, text in enumerate(held_out_prompts(PROMPTS, PROMPT_BYTES))
    ]


def together(engine: Engine, temperature: float) -> Texts:
    """How an engine continues the prompts side by side."""
    return [(generation.token_ids, generation.accepted) for generation in engine.generate(requests_at(temperature))]


def alone(engine: Engine, temperature: float) -> Texts:
    """How it continues each prompt while it has no other."""
    generations = [engine.generate([request])[0] for request in requests_at(temperature)]
    return [(generation.token_ids, generation.accepted) for generation in generations]


def compare(subject: Subject, head: dict[str, Any]) -> Iterator[AgreementRow]:
    """Rows for each number of draft tokens, temperature and strategy: one for all graph modes that end the same."""
    counts = INVARIANT_DRAFT_TOKENS if subject.batch_invariant else DRAFT_TOKENS
    plain = {temperature: together(subject.engine(0), temperature) for temperature in TEMPERATURES}
    for count, temperature in product(counts, TEMPERATURES):
        engine = subject.engine(count, strategy=Strategy.EAGER)
        eager = together(engine, temperature)
        cell = {**head, "num_speculative_tokens": count, "temperature": temperature, "prompts": PROMPTS}
        cell |= {"batch_invariant": subject.batch_invariant, "accepted": round(engine.stats.mean_accepted, 3)}
        for strategy, modes in WAYS.items():
            same: dict[tuple[Any, ...], list[str]] = {}
            for mode in modes:
                try:
                    engine = subject.engine(count, mode, strategy)
                    outcome = "", *differences(subject, engine, temperature, eager, plain[temperature])
                except StrategyError as error:
                    outcome = str(error), None, None, None
                same.setdefault(outcome, []).append(mode.value)
            for outcome, names in same.items():
                found = dict(zip(("refusal", "unlike_eager", "unlike_plain", "unlike_alone"), outcome, strict=True))
                yield AgreementRow(**cell, **found, strategy=strategy.value, graph_modes=tuple(names))


def differences(
    subject: Subject, engine: Engine, temperature: float, eager: Texts, plain: Texts
) -> tuple[int, int | None, int | None]:
    """Prompts whose text or kept tokens differ from eager drafting, whose text differs from plain decoding, and which
    differ from themselves alone; None where rounding or chance may be why."""
    found = together(engine, temperature)
    unlike_plain = sum(ours[0] != theirs[0] for ours, theirs in zip(found, plain, strict=True))
    return (
        unlike(found, eager),
        unlike_plain if temperature == 0 else None,
        unlike(found, alone(engine, temperature)) if subject.exact else None,
    )


def unlike(found: Texts, expected: Texts) -> int:
    """Prompts with another text, or other tokens kept in a round."""
    return sum(ours != theirs for ours, theirs in zip(found, expected, strict=True))


def agreement(job: tuple[str, str, str]) -> list[AgreementRow]:
    """The rows of one draft on one backend: in the first dtype that it serves, and batch invariant in bfloat16."""
    draft, name, where = job
    rows: list[AgreementRow] = []
    for dtype, batch_invariant in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        if rows and not batch_invariant:
            continue
        pair = load_byte_pair(SHIPPED_PAIR, dtype, torch.device(where), draft=draft)
        config = engine_config(num_speculative_tokens=0, page_size=PAGE_SIZE, batch_invariant=batch_invariant)
        if backends := backends_named(pair, config, name):
            head = {"draft": draft, "backend": name, "dtype": str(dtype).removeprefix("torch.")}
            rows += compare(Subject(pair=pair, backends=backends, batch_invariant=batch_invariant), head)
    return rows


@pytest.mark.gpu
def test_drafts_agree_in_every_graph_mode_and_strategy(write_report):
    jobs = list(product(draft_names(SHIPPED_PAIR), registry.names(), ["cuda"]))
    with multiprocessing.get_context("spawn").Pool(JOBS, maxtasksperchild=1) as pool:
        rows = [row for found in pool.imap(agreement, jobs) for row in found]
    write_report(AGREEMENT_SCHEMA, backends=registry.names(), rows=msgspec.to_builtins(rows))
    assert rows and not [row for row in rows if row.broken]


# On a CPU, small.


@pytest.fixture
def rows(monkeypatch):
    """Makes the rows of one backend: few and short texts, one graph strategy."""
    small = {"PROMPTS": 2, "NEW_TOKENS": 4, "DRAFT_TOKENS": (2,), "TEMPERATURES": (0.0,), "INVARIANT_DRAFT_TOKENS": ()}
    ways = {strategy: WAYS[strategy] for strategy in (Strategy.EAGER, Strategy.PER_STEP)}
    for name, value in {**small, "WAYS": ways}.items():
        monkeypatch.setattr(f"{__name__}.{name}", value)
    return lambda: agreement(("draft", "triton_paged", "cpu"))


def test_right_backend_agrees(rows):
    assert [(row.dtype, row.graph_modes, row.refusal, row.broken) for row in rows()] == [
        ("float32", tuple(mode.value for mode in modes), "", False) for modes in WAYS.values()
    ]


def test_batch_dependent_texts_are_broken(rows, monkeypatch):
    forward = TritonPaged.forward

    def scaled(self, query, *args, **options):
        return forward(self, query, *args, **options) * len(query)

    monkeypatch.setattr(TritonPaged, "forward", scaled)
    assert any(row.broken and row.unlike_alone for row in rows())
