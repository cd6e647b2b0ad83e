"""An engine with the shipped pair that serves requests of every kind, with so few pages that some are preempted."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attn_backends import registry
from spec_decode.drafter import Strategy
from spec_decode.engine import Engine, Handle, Request
from spec_decode.llm.pair import Pair, load_byte_pair
from spec_decode.models import SHIPPED_PAIR
from spec_decode.testing.held_out_text import held_out_documents
from tests.factories import engine_config, make_request

BACKEND, DTYPE = "triton_paged", torch.float32
PAGE_SIZE = 1
"""Larger pages cause fewer preemptions."""
POOL = 512
"""Pages: a third of what full rows need, so that growing texts run out of them."""
DRAFT_TOKENS, MAX_REQS = 4, 32
PROMPT, NEW = (4, 60), (4, 40)
ARRIVALS = (0, 0, 1, 2, 4, 16)
STOPS = b"aeinost \n."
CANCELS_A_STEP, CANCELS_A_TOKEN = 0.05, 0.001


@dataclass
class BusyRun:
    """The outcome of all requests under one verifier."""

    verification: str
    handles: list[Handle]
    strategy: Strategy | None
    seconds: float
    pages_lost: int
    counts: dict[str, Any]


def make_requests(count: int, rng: random.Random) -> list[Request]:
    """Return held-out text to continue, with every kind of sampling, every fourth request with stop tokens. Prompts
    tend to be short and texts long: the more a text grows, the more it runs out of pages."""
    text = "\n".join(held_out_documents()).encode()

    def prompt() -> bytes:
        start = rng.randrange(len(text) - PROMPT[1])
        return text[start : start + PROMPT[0] + int((PROMPT[1] - PROMPT[0]) * rng.random() ** 3)]

    return [
        make_request(
            prompt=list(prompt()),
            max_tokens=NEW[1] - int((NEW[1] - NEW[0]) * rng.random() ** 2),
            temperature=rng.choice((0.0, 1.0)),
            top_k=rng.choice((0, 0, 3, 20)),
            top_p=rng.choice((1.0, 1.0, 0.7, 0.95)),
            seed=rng.getrandbits(62),
            stop_token_ids=frozenset(rng.sample(STOPS, 2)) if index % 4 == 0 else frozenset(),
        )
        for index in range(count)
    ]


def load_pair(device: torch.device) -> Pair:
    """Load the shipped pair afresh."""
    return load_byte_pair(SHIPPED_PAIR, DTYPE, device)


def make_engine(pair: Pair, verification: str, **options: Any) -> Engine:
    """Make an engine for these requests."""
    config = engine_config(
        num_speculative_tokens=DRAFT_TOKENS,
        max_model_len=PROMPT[1] + NEW[1],
        page_size=PAGE_SIZE,
        verification=verification,
        **options,
    )
    return Engine(pair.target, pair.draft, registry.get(BACKEND), config)


def serve(pair: Pair, verification: str, requests: Sequence[Request], rng: random.Random, **options: Any) -> BusyRun:
    """Serve the requests, which arrive at random and are sometimes cancelled, until all have ended. options: further
    ones for the engine."""
    options |= {"max_num_seqs": MAX_REQS, "num_pages": POOL, "max_prefill_tokens": 256}
    engine = make_engine(pair, verification, **options)
    engine.capture()
    handles: list[Handle] = []
    cancels: Counter[str] = Counter()

    def cancel_one(where: str) -> None:
        live = [handle for handle in handles[-2 * MAX_REQS :] if not handle.done]
        if live:
            engine.cancel(rng.choice(live))
            cancels[where] += 1

    def on_token(_: int) -> None:
        if rng.random() < CANCELS_A_TOKEN:
            cancel_one("by a callback")

    start, joins, busy = time.perf_counter(), 0, True
    while busy or len(handles) < len(requests):
        arriving = requests[len(handles) : len(handles) + rng.choice(ARRIVALS)]
        joins += bool(arriving)
        handles += [engine.submit(request, on_token=on_token) for request in arriving]
        if rng.random() < CANCELS_A_STEP:
            cancel_one("between steps")
        busy = engine.step()
    seconds, stats = time.perf_counter() - start, engine.stats
    counts = {
        "requests": len(handles),
        "finished": dict(Counter(h.generation.finish_reason or "never" for h in handles)),
        "cancelled": dict(cancels),
        "preemptions": stats.preemptions,
        "rounds": stats.rounds,
        "steps_with_joins": joins,
        "joins_a_round": round(len(handles) / stats.rounds, 2),
        "rows_a_round": round(stats.drafted_for / stats.rounds, 2),
        "new_tokens": stats.new_tokens,
        "prefill_tokens": stats.prefill_tokens,
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "mean_accepted": round(stats.mean_accepted, 3),
    }
    strategy = engine.plan.strategy if engine.plan else None
    return BusyRun(verification, handles, strategy, round(seconds, 2), POOL - engine.pool.num_free, counts)
