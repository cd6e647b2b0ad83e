"""Compare a busy engine with each request alone: python scripts/engine_run.py --requests 5000 --json FILE.

The shipped pair, its requests joining at random and of every kind (greedy and sampled, top-k and top-p, stop tokens),
some cancelled between steps or by a callback, over a page pool so small that texts grow into preemption; half of them
under each verifier. A sample is then decoded one by one, and each text must be the same; that of a cancelled request as
far as it went. In float32 where the backend has it, else in bfloat16.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from attn_backends import AttentionBackend, NoBackend, registry
from scripts.script_report import script_options, write_report
from spec_decode.drafter import GraphMode, Strategy
from spec_decode.engine import Engine, EngineConfig, Finish, Generation, Handle, Request
from spec_decode.llm.pair import Pair, load_byte_pair
from spec_decode.models import SHIPPED_PAIR
from spec_decode.models.held_out_text import held_out_documents

SCHEMA = "attn-engine-run/2"
VERIFIERS = ("rejection", "block")
DRAFT_TOKENS, MAX_REQS = 4, 32
PROMPT, NEW = (4, 60), (4, 40)
POOL = 512
"""Tokens that all pages hold: a third of what full rows need, so that growing texts run out of them."""
ARRIVALS = (0, 0, 1, 2, 4, 16)
STOPS = b"aeinost \n."
CANCELS_A_STEP, CANCELS_A_TOKEN = 0.05, 0.001
NOISE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""What roundings may move a logit by, in shares of the row's largest magnitude."""
TRIES = 32
RULE = (
    "A kernel's sums depend on the padded batch, so a text may leave its own at a decision that roundings tip. A "
    f"difference is excused only if, in one of {TRIES} more runs of the request alone, in which the logits of target "
    "and draft get noise around that token of at most `noise` times their largest magnitude, the text leaves at that "
    "very token with the token that the busy engine's text has. The same for greedy and sampled texts."
)
STOPPED = -1
"""Stands for the stop token that ended a text."""


@dataclass
class BusyRun:
    """What became of the requests under one verifier."""

    verification: str
    handles: list[Handle]
    strategy: Strategy | None
    seconds: float
    pages_lost: int
    counts: dict[str, Any]


@dataclass
class Sample:
    """How the texts of some requests compare with those of each request alone."""

    greedy: int = 0
    sampled: int = 0
    cancelled: int = 0
    equal: int = 0
    excused: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[dict[str, Any]] = field(default_factory=list)


def make_requests(count: int, rng: random.Random) -> list[Request]:
    """Stretches of held-out text to continue, of every kind of sampling, each fourth with stop tokens. Prompts are more
    often short and texts more often long: what grows most runs out of pages."""
    text = "\n".join(held_out_documents()).encode()

    def prompt() -> bytes:
        start = rng.randrange(len(text) - PROMPT[1])
        return text[start : start + PROMPT[0] + int((PROMPT[1] - PROMPT[0]) * rng.random() ** 3)]

    return [
        Request(
            prompt=list(prompt()),
            max_new_tokens=NEW[1] - int((NEW[1] - NEW[0]) * rng.random() ** 2),
            temperature=rng.choice((0.0, 1.0)),
            top_k=rng.choice((0, 0, 3, 20)),
            top_p=rng.choice((1.0, 1.0, 0.7, 0.95)),
            seed=rng.getrandbits(62),
            stop_ids=frozenset(rng.sample(STOPS, 2)) if index % 4 == 0 else frozenset(),
        )
        for index in range(count)
    ]


@dataclass(frozen=True, slots=True)
class RunConfig:
    """What every engine of a run has in common."""

    backend: AttentionBackend
    dtype: torch.dtype
    device: torch.device
    page_size: int

    @property
    def pages(self) -> int:
        return POOL // self.page_size

    def load_pair(self) -> Pair:
        """The shipped pair, loaded anew."""
        return load_byte_pair(SHIPPED_PAIR, self.dtype, self.device)

    def make_engine(self, pair: Pair, verification: str, **options: Any) -> Engine:
        """An engine for such requests."""
        config = EngineConfig(
            num_speculative_tokens=DRAFT_TOKENS,
            max_seq_len=PROMPT[1] + NEW[1],
            page_size=self.page_size,
            verification=verification,
            **options,
        )
        return Engine(pair.target, pair.draft, self.backend, config)


def serve(
    config: RunConfig,
    pair: Pair,
    verification: str,
    requests: Sequence[Request],
    rng: random.Random,
    **options: Any,
) -> BusyRun:
    """Serve the requests, which join at random, until nothing is left. options: more of the engine's."""
    sizes = {"max_reqs": MAX_REQS, "num_pages": config.pages, "max_prefill_tokens": 256}
    engine = config.make_engine(pair, verification, **sizes, **options)
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
        "finished": dict(Counter(h.generation.finish.value if h.generation.finish else "never" for h in handles)),
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
    return BusyRun(verification, handles, strategy, round(seconds, 2), config.pages - engine.pool.num_free, counts)


def tokens_of(generation: Generation) -> list[int]:
    """The text, with STOPPED after one that a stop token ended."""
    return generation.token_ids + [STOPPED] * (generation.finish is Finish.STOP)


class NoisyEngine:
    """An engine for one request at a time that adds noise to the logits of its pair around one token of the text."""

    def __init__(self, config: RunConfig, verification: str) -> None:
        pair = config.load_pair()
        self._noise, self._on = NOISE[config.dtype], False
        for model in (pair.target, pair.draft):
            model.logits = self._with_noise(model.logits)  # type: ignore[method-assign, assignment]
        # The host switches the noise token by token, which no graph would see.
        self._engine = config.make_engine(pair, verification, max_reqs=1, graph_mode=GraphMode.NONE)

    def leads_to(self, request: Request, tokens: Sequence[int], at: int) -> bool:
        """Whether a noisy text is `tokens` up to and with token `at`, in any of the tries."""
        reach = 2 * (1 + DRAFT_TOKENS)  # the host gets up to 1 + K tokens at once, a round late
        seen = 0

        def on_token(_: int, __: int) -> None:
            nonlocal seen
            seen += 1
            self._on = seen + reach >= at

        for _ in range(TRIES):
            seen, self._on = 0, at <= reach
            if tokens_of(self._engine.generate([request], on_token=on_token)[0])[: at + 1] == tokens[: at + 1]:
                return True
        return False

    def _with_noise(self, exact: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        def logits(hidden: torch.Tensor) -> torch.Tensor:
            out = exact(hidden)
            if not self._on:
                return out
            return out + self._noise * out.abs().amax(-1, keepdim=True) * (2 * torch.rand_like(out) - 1)

        return logits


def compare(busy_run: BusyRun, handles: Sequence[Handle], alone: Engine, noisy: NoisyEngine) -> Sample:
    """Compare each of these requests' texts with that of the engine `alone`; differences are excused by RULE."""
    sample = Sample()
    for handle in handles:
        request, generation = handle.request, handle.generation
        sample.sampled += request.temperature > 0
        sample.greedy += request.temperature == 0
        sample.cancelled += generation.finish is Finish.CANCELLED
        found, expected = tokens_of(generation), tokens_of(alone.generate([request])[0])
        if (expected[: len(found)] if generation.finish is Finish.CANCELLED else expected) == found:
            sample.equal += 1
            continue
        pairs = enumerate(zip(found, expected, strict=False))
        at = next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(found), len(expected)))
        excused = at < len(found) and noisy.leads_to(request, found, at)
        row = {"request": busy_run.handles.index(handle), "temperature": request.temperature, "token": at}
        (sample.excused if excused else sample.wrong).append({**row, "tokens": found, "tokens_alone": expected})
    return sample


def problems_of(busy_run: BusyRun, sample: Sample) -> list[str]:
    """Why the run is no proof, or proves the opposite."""
    finished = busy_run.counts["finished"]
    found = {
        f"{len(sample.wrong)} texts differ from those decoded alone": sample.wrong,
        f"{busy_run.pages_lost} pages did not come back": busy_run.pages_lost,
        f"{finished.get('never', 0)} requests never ended": "never" in finished,
        "nobody was preempted": not busy_run.counts["preemptions"],
        "nobody was cancelled": "cancelled" not in finished,
        "no stop token was met": "stop" not in finished,
        "none of the sample was decoded to its end": sample.cancelled == sample.greedy + sample.sampled,
    }
    return [problem for problem, present in found.items() if present]


def run(config: RunConfig, requests: int, sampled: int, rng: random.Random) -> list[dict[str, Any]]:
    """An equal part of the requests under each verifier, and the comparison of a sample of them."""
    pair, rows = config.load_pair(), []
    for verification in VERIFIERS:
        busy_run = serve(config, pair, verification, make_requests(requests // len(VERIFIERS), rng), rng)
        alone = config.make_engine(pair, verification, max_reqs=1, strategy=busy_run.strategy)
        handles = rng.sample(busy_run.handles, min(len(busy_run.handles), sampled // len(VERIFIERS)))
        noisy, start = NoisyEngine(config, verification), time.perf_counter()
        sample = compare(busy_run, handles, alone, noisy)
        row = {
            "verification": verification,
            "strategy": busy_run.strategy.value if busy_run.strategy else None,
            "seconds": busy_run.seconds,
            **busy_run.counts,
            "pages_lost": busy_run.pages_lost,
            "sample": {**asdict(sample), "seconds": round(time.perf_counter() - start, 2)},
            "problems": problems_of(busy_run, sample),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def dtype_for(name: str, page_size: int, device: torch.device) -> torch.dtype:
    """float32 where the backend serves the pair in it, else bfloat16. Raises NoBackend where it serves neither."""
    reasons: list[str] = []
    for dtype in NOISE:
        pair = load_byte_pair(SHIPPED_PAIR, dtype, torch.device("cpu"))
        groups = [*pair.target.layer_groups(page_size), *pair.draft.layer_groups(page_size)]
        verdicts = [registry.explain(name, group.spec, device) for group in groups]
        if all(verdicts):
            return dtype
        reasons += [f"{dtype}: {reason}" for verdict in verdicts for reason in getattr(verdict, "reasons", ())]
    raise NoBackend(
        f"the run needs a backend that serves the shipped pair on {device.type}, {name} refuses: "
        f"{'; '.join(dict.fromkeys(reasons))}. Nothing was run; choose another backend."
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run, write the report, and fail if a text differs, a page is lost or something did not happen at all."""
    parser = script_options(__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--sample", type=int, default=400, help="how many of them are decoded one by one")
    parser.add_argument("--backend", default="triton_paged")
    parser.add_argument("--page-size", type=int, default=1, help="the larger, the fewer preemptions")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args(argv)
    dtype = dtype_for(flags.backend, flags.page_size, flags.device)
    torch.manual_seed(flags.seed)  # that of the noise
    config = RunConfig(registry.get(flags.backend), dtype, flags.device, flags.page_size)
    rows = run(config, flags.requests, flags.sample, random.Random(flags.seed))
    write_report(
        flags.json,
        SCHEMA,
        flags.device,
        ["scripts.engine_run"],
        backends=[flags.backend],
        backend=flags.backend,
        backend_version=config.backend.version,
        dtype=str(dtype).removeprefix("torch."),
        max_reqs=MAX_REQS,
        pages=config.pages,
        page_size=config.page_size,
        draft_tokens=DRAFT_TOKENS,
        rule=RULE,
        noise=NOISE[dtype],
        rows=rows,
    )
    if any(row["problems"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
