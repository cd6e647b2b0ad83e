"""A small engine: requests join, are drafted for and verified together, and leave at different times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from attn_backends import AttentionBackend
from builders import RequestTables
from builders.errors import require
from spec_decode.drafter import Drafter, Drafts, VerifiedTokens
from spec_decode.kv_groups import KVGroup, make_group
from spec_decode.models import EagleDraft, LlamaTarget
from spec_decode.strategy import DraftPlan, GraphMode, Strategy
from spec_decode.target import TargetRunner
from spec_decode.verification import sample_target, verifier

MIN_TEMPERATURE = 1e-3
"""Below it, logits over the temperature leave fp32; greedy decoding is temperature 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A prompt and how to continue it. temperature 0 is greedy; stop_ids end the text and are not part of it."""

    prompt: Sequence[int]
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()


@dataclass(slots=True)
class Generation:
    """What became of a request. accepted: draft tokens kept, one entry a round."""

    token_ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


@dataclass(slots=True)
class EngineStats:
    """Totals of one generate(): rounds, and the wall time its propose() calls took from call to return."""

    rounds: int = 0
    propose_seconds: float = 0.0
    accepted: int = 0
    drafted_for: int = 0

    @property
    def mean_accepted(self) -> float:
        """Draft tokens kept per request and round."""
        return self.accepted / max(1, self.drafted_for)

    @property
    def host_us_a_round(self) -> float:
        return 1e6 * self.propose_seconds / max(1, self.rounds)


@dataclass(slots=True)
class _Live:
    """A running request. `verified` and `hidden` are the target's last [1 + K] tokens and hidden states."""

    request: Request
    generation: Generation
    tokens: list[int]
    pages: list[int]
    limit: int
    verified: torch.Tensor
    hidden: torch.Tensor
    accepted: int = 0

    @property
    def done(self) -> bool:
        return len(self.generation.token_ids) >= self.request.max_new_tokens or self.stopped

    @property
    def stopped(self) -> bool:
        generated = self.generation.token_ids
        return bool(generated) and generated[-1] in self.request.stop_ids


class Engine:
    """A target, its draft and their paged caches on one device. num_speculative_tokens 0 decodes plainly."""

    def __init__(
        self,
        target: LlamaTarget,
        draft: EagleDraft,
        backend: AttentionBackend,
        *,
        num_speculative_tokens: int,
        max_reqs: int = 8,
        max_seq_len: int = 512,
        page_size: int = 16,
        graph_mode: GraphMode = GraphMode.FULL,
        strategy: Strategy | None = None,
        draft_backend: AttentionBackend | None = None,
        verification: str = "rejection",
    ) -> None:
        """max_seq_len bounds prompt and new tokens together.

        draft_backend: the draft's, where it is another; the two may have attention of different kinds. verification: a
        name that spec_decode.verification.verifier knows.
        """
        require(
            num_speculative_tokens >= 0 and max_seq_len + num_speculative_tokens < target.config.max_positions,
            f"speculative tokens must be 0 or more and leave room below the model's {target.config.max_positions} "
            f"positions, got {num_speculative_tokens} with max_seq_len {max_seq_len}; nothing was allocated. Lower "
            "either.",
        )
        self._verifier = verifier(verification, num_speculative_tokens=num_speculative_tokens)
        weight = target.embed.weight
        self._device, self._dtype = weight.device, weight.dtype
        self._steps = num_speculative_tokens
        self._max_seq_len = max_seq_len
        self._page_size = page_size
        capacity = max_seq_len + num_speculative_tokens + 1
        pages = max_reqs * -(-capacity // page_size)
        self._free = list(range(pages))[::-1]

        def tables() -> RequestTables:
            return RequestTables(
                page_sizes=[page_size],
                num_pages=[pages],
                max_reqs=max_reqs,
                max_seq_len=capacity,
                device=self._device,
            )

        self._tables, self._joining = tables(), tables()
        self._target = TargetRunner(target, [self._group("target", target, backend, pages)])
        self.drafter: Drafter | None = None
        if num_speculative_tokens:
            group = self._group("draft", draft, draft_backend or backend, pages)
            self.drafter = Drafter(
                draft,
                [group],
                self._tables,
                num_speculative_tokens=num_speculative_tokens,
                graph_mode=graph_mode,
                strategy=strategy,
            )
        self.stats = EngineStats()

    @property
    def plan(self) -> DraftPlan | None:
        """The drafter's plan; None when decoding plainly."""
        return self.drafter.plan if self.drafter else None

    def _group(self, name: str, model: LlamaTarget | EagleDraft, backend: AttentionBackend, pages: int) -> KVGroup:
        spec = model.config.attention_spec(self._page_size, self._dtype)
        return make_group(name, backend, spec, range(model.config.num_layers), num_pages=pages, device=self._device)

    @torch.no_grad()
    def generate(
        self, requests: Sequence[Request], *, on_token: Callable[[int, int], None] | None = None
    ) -> list[Generation]:
        """Continue every request; results in the order of the requests. on_token(request index, token) streams.

        Raises BatchError, with nothing run, for a request that no row of the engine can hold.
        """
        for index, request in enumerate(requests):
            self._check(index, request)
        self.stats = EngineStats()
        results = [Generation() for _ in requests]
        waiting = list(zip(requests, results, strict=True))[::-1]
        order = {id(result): index for index, result in enumerate(results)}
        live: list[_Live] = []
        try:
            while waiting or live:
                joined = self._admit(waiting, live)
                live += joined
                if joined:
                    self._prefill(joined, on_token, order)
                remaining = self._retire(live)
                if joined or len(remaining) != len(live):
                    self._load_tables(self._tables, remaining)
                live = remaining
                if live:
                    self._round(live, on_token, order)
        finally:
            for request_state in live:
                self._free += request_state.pages
        return results

    def _check(self, index: int, request: Request) -> None:
        total = len(request.prompt) + request.max_new_tokens
        vocab = self._target.model.config.vocab_size
        require(
            len(request.prompt) > 0 and request.max_new_tokens > 0 and total <= self._max_seq_len,
            f"request {index} needs a prompt and new tokens of at most {self._max_seq_len} together, got "
            f"{len(request.prompt)} and {request.max_new_tokens}; nothing was run. Shorten it or raise max_seq_len.",
        )
        require(
            all(isinstance(token, int) and 0 <= token < vocab for token in request.prompt),
            f"request {index} must hold token ids, integers 0 to {vocab - 1}, got {min(request.prompt)} to "
            f"{max(request.prompt)}; nothing was run. Encode it with this model's vocabulary.",
        )
        require(
            (request.temperature == 0 or request.temperature >= MIN_TEMPERATURE) and -(2**63) <= request.seed < 2**63,
            f"request {index} needs a temperature of 0 (greedy) or at least {MIN_TEMPERATURE:g} and a 64-bit seed, got "
            f"{request.temperature} and {request.seed}; logits over it would overflow. Nothing was run.",
        )

    def _admit(self, waiting: list[tuple[Request, Generation]], live: list[_Live]) -> list[_Live]:
        joined: list[_Live] = []
        while waiting and len(live) + len(joined) < self._tables.max_reqs:
            request, generation = waiting.pop()
            limit = len(request.prompt) + request.max_new_tokens + self._steps + 1
            pages = [self._free.pop() for _ in range(-(-limit // self._page_size))]
            empty = torch.empty(0)
            joined.append(_Live(request, generation, list(request.prompt), pages, limit, empty, empty))
        return joined

    def _retire(self, live: list[_Live]) -> list[_Live]:
        for state in live:
            if state.done:
                self._free += state.pages
                state.pages = []
                if state.stopped:
                    state.generation.token_ids.pop()
        return [state for state in live if state.pages]

    def _load_tables(self, tables: RequestTables, live: list[_Live]) -> None:
        tables.load([[state.pages for state in live]], [state.limit for state in live])

    def _prefill(self, joined: list[_Live], on_token: Callable[[int, int], None] | None, order: dict[int, int]) -> None:
        """Run the prompts through target and draft; each request then stands as if one token had been verified."""
        self._load_tables(self._joining, joined)
        lens = [len(state.tokens) for state in joined]
        flat = self._ids([token for state in joined for token in state.tokens])
        hidden = self._target.run(self._joining, lens, lens, flat).split(lens)
        last = torch.stack([rows[-1] for rows in hidden])
        tokens = sample_target(
            self._target.model.logits(last),
            temperature=self._temperature(joined),
            seeds=self._seeds(joined),
            positions=self._ids(lens),
        ).tolist()
        if self.drafter:
            self._prefill_draft(joined, hidden)
        for state, rows, token in zip(joined, hidden, tokens, strict=True):
            state.hidden = rows[-1:].expand(self._steps + 1, -1)
            state.verified = self._ids([state.tokens[-1]] * (self._steps + 1))
            self._commit(state, [token], on_token, order)

    def _prefill_draft(self, joined: list[_Live], hidden: Sequence[torch.Tensor]) -> None:
        """The draft's position p pairs token p + 1 with hidden state p; the last pair waits for the first round."""
        assert self.drafter is not None
        longer = [(state, rows) for state, rows in zip(joined, hidden, strict=True) if len(state.tokens) > 1]
        if longer:
            self._load_tables(self._joining, [state for state, _ in longer])
            self.drafter.prefill(
                self._joining,
                [len(state.tokens) - 1 for state, _ in longer],
                self._ids([token for state, _ in longer for token in state.tokens[1:]]),
                torch.cat([rows[:-1] for _, rows in longer]),
            )

    def _round(self, live: list[_Live], on_token: Callable[[int, int], None] | None, order: dict[int, int]) -> None:
        self.stats.rounds += 1
        if self.drafter is None:
            return self._plain_round(live, on_token, order)
        lens = [len(state.tokens) for state in live]
        seeds, positions = self._seeds(live), self._ids(lens)
        drafts = self._propose(live, self._verifier.draft_seeds(seeds, positions))
        last = self._ids([state.tokens[-1] for state in live])
        verified = torch.cat([last[:, None], drafts.tokens.clamp(min=0)], 1)
        width = self._steps + 1
        hidden = self._target.run(
            self._tables, [width] * len(live), [n + self._steps for n in lens], verified.flatten()
        )
        verdict = self._verifier.verify(
            self._target.model.logits(hidden).view(len(live), width, -1),
            drafts.tokens,
            drafts.logits,
            temperature=self._temperature(live),
            seeds=seeds,
            first_positions=positions,
        )
        counts, kept, added = verdict.accepted.tolist(), drafts.tokens.tolist(), verdict.next_tokens.tolist()
        rows = zip(live, verified, hidden.view(len(live), width, -1), counts, strict=True)
        for index, (state, tokens, states, accepted) in enumerate(rows):
            state.verified, state.hidden, state.accepted = tokens, states, accepted
            state.generation.accepted.append(accepted)
            self._commit(state, [*kept[index][:accepted], added[index]], on_token, order)
        self.stats.accepted += sum(counts)
        self.stats.drafted_for += len(live)
        return None

    def _propose(self, live: list[_Live], seeds: torch.Tensor) -> Drafts:
        assert self.drafter is not None
        first = [len(state.tokens) - 2 - state.accepted for state in live]
        verified = VerifiedTokens(
            token_ids=torch.stack([state.verified for state in live]),
            features=torch.stack([state.hidden for state in live]),
            context_lens=self._ids(first).int(),
            accepted=self._ids([state.accepted for state in live]).int(),
            next_tokens=self._ids([state.tokens[-1] for state in live]),
            temperature=self._temperature(live),
            seeds=seeds,
        )
        start = time.perf_counter()
        drafts = self.drafter.propose(verified)
        self.stats.propose_seconds += time.perf_counter() - start
        return drafts

    def _plain_round(
        self, live: list[_Live], on_token: Callable[[int, int], None] | None, order: dict[int, int]
    ) -> None:
        lens = [len(state.tokens) for state in live]
        hidden = self._target.run(self._tables, [1] * len(live), lens, self._ids([state.tokens[-1] for state in live]))
        tokens = sample_target(
            self._target.model.logits(hidden),
            temperature=self._temperature(live),
            seeds=self._seeds(live),
            positions=self._ids(lens),
        ).tolist()
        for state, token in zip(live, tokens, strict=True):
            self._commit(state, [token], on_token, order)

    def _commit(
        self,
        state: _Live,
        tokens: list[int],
        on_token: Callable[[int, int], None] | None,
        order: dict[int, int],
    ) -> None:
        for token in tokens:
            if state.done:
                break
            state.tokens.append(token)
            state.generation.token_ids.append(token)
            if on_token and token not in state.request.stop_ids:
                on_token(order[id(state.generation)], token)

    def _ids(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self._device)

    def _temperature(self, live: list[_Live]) -> torch.Tensor:
        return torch.tensor([state.request.temperature for state in live], device=self._device)

    def _seeds(self, live: list[_Live]) -> torch.Tensor:
        return self._ids([state.request.seed for state in live])
