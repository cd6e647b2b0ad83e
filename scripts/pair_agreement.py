"""Draft with the shipped pair on every backend it fits: python scripts/pair_agreement.py --json FILE.

For 2, 3, 4 and 5 draft tokens, in every graph mode and strategy, greedily and at temperature 1, with fixed seeds: draft
tokens kept in each round and final text must be those of eager drafting. In float32 where a backend has it, else in
bfloat16, whose greedy text may leave plain decoding's where two candidates lie within rounding. A process for each
draft and backend.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from attn_backends import registry
from scripts.script_report import script_options, write_report
from spec_decode.cli.byte_pair import PAGE_SIZE, Pair, load_byte_pair
from spec_decode.cli.generate import Backends, backends_named
from spec_decode.drafter import GraphMode, Strategy, StrategyError
from spec_decode.engine import Engine, EngineConfig, Request
from spec_decode.models import SHIPPED_PAIR, draft_names
from spec_decode.models.byte_tokenizer import encode
from spec_decode.models.held_out_text import held_out_prompts

SCHEMA = "attn-pair-agreement/2"
TEMPERATURES = (0.0, 1.0)
DRAFT_TOKENS = (2, 3, 4, 5)
PROMPTS, PROMPT_BYTES, NEW_TOKENS, SEED = 6, 64, 48, 7

Texts = list[tuple[list[int], list[int]]]
"""For every prompt the new tokens, and the draft tokens kept in each round."""


def run(
    pair: Pair,
    backends: Backends,
    count: int,
    temperature: float,
    mode: GraphMode = GraphMode.NONE,
    strategy: Strategy | None = None,
) -> tuple[Texts, float]:
    """How an engine continues the prompts, and the mean number of draft tokens kept."""
    requests = [
        Request(prompt=encode(text), max_new_tokens=NEW_TOKENS, temperature=temperature, seed=SEED + index)
        for index, text in enumerate(held_out_prompts(PROMPTS, PROMPT_BYTES))
    ]
    config = EngineConfig(
        num_speculative_tokens=count,
        max_reqs=4,
        max_seq_len=max(request.max_len for request in requests),
        page_size=PAGE_SIZE,
        graph_mode=mode,
        strategy=strategy,
    )
    engine = Engine(pair.target, pair.draft, backends.target, config, draft_backend=backends.draft)
    texts = [(generation.token_ids, generation.accepted) for generation in engine.generate(requests)]
    return texts, engine.stats.mean_accepted


def compare(pair: Pair, backends: Backends) -> Iterator[dict[str, Any]]:
    """A row for each number of draft tokens, temperature, graph mode and strategy."""
    for count, temperature in product(DRAFT_TOKENS, TEMPERATURES):
        plain, _ = run(pair, backends, 0, temperature)
        eager, accepted = run(pair, backends, count, temperature, strategy=Strategy.EAGER)
        cell = {"num_speculative_tokens": count, "temperature": temperature, "prompts": PROMPTS}
        for mode, strategy in product(GraphMode, Strategy):
            if (mode is GraphMode.NONE) != (strategy is Strategy.EAGER):
                continue
            row = {**cell, "graph_mode": mode.value, "strategy": strategy.value, "accepted": round(accepted, 3)}
            try:
                found, _ = run(pair, backends, count, temperature, mode, strategy)
            except StrategyError as error:
                yield {**row, "refusal": str(error), "unlike_eager": None, "unlike_plain": None}
                continue
            unlike_plain = sum(ours[0] != theirs[0] for ours, theirs in zip(found, plain, strict=True))
            yield {
                **row,
                "refusal": "",
                "unlike_eager": sum(ours != theirs for ours, theirs in zip(found, eager, strict=True)),
                "unlike_plain": unlike_plain if temperature == 0 else None,
            }


def agreement(job: tuple[str, str, str]) -> list[dict[str, Any]]:
    """The rows of one draft on one backend; none where it serves the draft in no dtype."""
    draft, name, where = job
    device = torch.device(where)
    for dtype in (torch.float32, torch.bfloat16):
        pair = load_byte_pair(SHIPPED_PAIR, dtype, device, draft=draft)
        if backends := backends_named(pair, name):
            head = {"draft": draft, "backend": name, "dtype": str(dtype).removeprefix("torch.")}
            return [{**head, **row} for row in compare(pair, backends)]
    return []


def main() -> None:
    """Compare, write the report, and fail if a strategy drafted other tokens than eager."""
    parser = script_options(__doc__)
    parser.add_argument("--jobs", type=int, default=4)
    flags = parser.parse_args()
    jobs = [(draft, name, str(flags.device)) for draft, name in product(draft_names(SHIPPED_PAIR), registry.names())]
    rows = []
    with multiprocessing.get_context("spawn").Pool(flags.jobs, maxtasksperchild=1) as pool:
        for job, found in zip(jobs, pool.imap(agreement, jobs), strict=True):
            rows += found
            ran = [row for row in found if not row["refusal"]]
            unlike = sum(bool(row["unlike_eager"]) for row in ran)
            print(*job[:2], f"{len(ran)} ran, {unlike} unlike eager", flush=True)
    write_report(flags.json, SCHEMA, flags.device, rows=rows)
    if not rows or any(row["unlike_eager"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
