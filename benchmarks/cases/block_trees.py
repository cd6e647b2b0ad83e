"""Whole engines with a draft that proposes a block at once: its tokens as a chain, and trees of the same block.

How many tokens are kept is measured on the shipped pair, with prompts it was not trained on. The cost of a round is
measured on a published shape, where random weights keep almost none: there a tree's `chain_ratio` is its throughput
over the chain's, so a tree pays off if it keeps 1 / chain_ratio times the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.cases.throughput import QWEN3_8B, Decoding, Models, ThroughputCase, TimedPair, rates_of, timed_pair
from benchmarks.random_drafts import RandomDraft
from benchmarks.rows import Bench, BenchRow
from spec_decode.engine import Engine, EngineStats, Request
from spec_decode.llm.byte_tokenizer import encode
from spec_decode.models import SHIPPED_PAIR, dflash, load_pair
from spec_decode.sampling import SamplingParams
from spec_decode.testing.held_out_text import held_out_prompts
from spec_decode.trees import DynamicTreeConfig

KEPT, ROUNDS = "block-trees", "block-tree-rounds"
_STEPS = 7
_TREES = tuple(DynamicTreeConfig(width=w, num_tokens=n) for w, n in ((4, 7), (8, 16), (8, 32), (8, 63)))


@dataclass(frozen=True, kw_only=True, slots=True)
class ShippedCase(ThroughputCase):
    """The shipped pair with held-out prompts, whose token count includes the one that begins every text."""

    temperature: float = 0.0

    def models(self, device: torch.device) -> Models:
        """Load both on the device."""
        return Models(*load_pair(SHIPPED_PAIR, draft="block_draft", dtype=self.dtype, device=device), None)

    def requests(self, count: int) -> list[Request]:
        """Return requests with a seed each."""
        return [
            Request(
                prompt=encode(prompt),
                sampling=SamplingParams(max_tokens=self.output, temperature=self.temperature, seed=seed),
            )
            for seed, prompt in enumerate(held_out_prompts(count, self.prompt - 1))
        ]


SHIPPED = ShippedCase(
    draft=RandomDraft(
        description="the shipped pair's DFlash draft: accepted tokens",
        kind=dflash,
        config={},
        backends=("triton_paged",),
    ),
    num_layers=0,
    dtype=torch.float32,
    backends=("triton_paged",),
    num_reqs=(32,),
    prompt=97,
    output=160,
    warm_up_tokens=8,
)
QWEN3_8B_ROUNDS = replace(QWEN3_8B, num_reqs=(1, 4, 16), output=96, warm_up_tokens=16)


def block_tree_rows(bench: Bench, case: ShippedCase = SHIPPED) -> Iterator[BenchRow]:
    """Yield the shipped pair, greedy and at temperature 1, each with its default verification."""
    for temperature in (0.0, 1.0):
        at = f"temperature {temperature:g}"
        with bench.noting(KEPT, at=at):
            timed = timed_pair(bench, replace(case, temperature=temperature))
            chain = Decoding(num_speculative_tokens=_STEPS, accepted=None)
            for row in _rows(KEPT, timed, chain, _TREES):
                yield {**row, "temperature": temperature}


def block_tree_round_rows(bench: Bench, case: ThroughputCase = QWEN3_8B_ROUNDS) -> Iterator[BenchRow]:
    """Yield a published shape, where a chain's tokens are kept as rarely as a tree's."""
    with bench.noting(ROUNDS):
        chain = Decoding(num_speculative_tokens=_STEPS, accepted=0.0)
        yield from _rows(ROUNDS, timed_pair(bench, case), chain, _TREES)


def _rows(name: str, timed: TimedPair, chain: Decoding, trees: Sequence[DynamicTreeConfig]) -> Iterator[BenchRow]:
    """Yield the chain and each tree, by number of requests; chain_ratio: output tokens per second over the chain's."""
    decodings = [chain, *(replace(chain, accepted=None, tree=tree) for tree in trees)]
    engines = [timed.engine(decoding) for decoding in decodings]
    for num_reqs in timed.case.num_reqs:
        requests, chain_rates = timed.case.requests(num_reqs), None
        for decoding, engine in zip(decodings, engines, strict=True):
            rates = rates_of(engine, requests, timed.case.warm_up_tokens, False)
            row = timed.row(name, decoding, num_reqs, False, rates)
            row |= {"case": name, "tree": decoding.tree is not None, "draft": _described(timed, decoding)}
            if chain_rates is None:
                chain_rates = rates
            else:
                row["chain_ratio"] = round(rates.tokens_per_second / chain_rates.tokens_per_second, 3)
            if chain.accepted is None:
                row["accepted"] = round(_kept(engine, requests), 3)
            yield row


def _kept(engine: Engine, requests: Sequence[Request]) -> float:
    """Return draft tokens kept per request and round over whole texts: rates stop at the first one to end."""
    engine.stats = EngineStats()
    engine.generate(requests)
    return engine.stats.mean_accepted


def _described(timed: TimedPair, decoding: Decoding) -> str:
    """Return the draft's name, with the tree's choices and tokens as the command line takes them."""
    tree = decoding.tree
    return timed.case.draft.name + (f", {tree.width}x{tree.num_tokens}" if tree else "")
