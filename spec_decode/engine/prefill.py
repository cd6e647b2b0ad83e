"""Chunked prefill: writes prompts to the caches chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from builders import RequestTables
from builders.devices import staged
from spec_decode.drafter import Drafter
from spec_decode.engine.request import RequestState
from spec_decode.engine.scheduler import Chunk
from spec_decode.engine.target_runner import TargetRunner
from spec_decode.paged import KVGroup, StateGroup
from spec_decode.sampling import Sampling
from spec_decode.sampling.logit_edits import LogitEdits
from spec_decode.sampling.target_sampler import TopLogprobs, sample_target, top_logprobs


@dataclass(frozen=True, slots=True)
class PrefillOutput:
    """n requests with complete prefill.

    tokens                int64 [n]   the token after each; -1 where its logits define no distribution
    target_hidden_states  [n, F]      at the last token in the cache
    logprobs              [n, 1 + N]  of these tokens; None without max_logprobs
    """

    requests: list[RequestState]
    tokens: torch.Tensor
    target_hidden_states: torch.Tensor
    logprobs: TopLogprobs | None = None


class Prefill:
    """Runs chunks through target and draft, over separate tables."""

    def __init__(
        self, target: TargetRunner, drafter: Drafter | None, tables: Sequence[RequestTables], max_logprobs: int = 0
    ) -> None:
        """tables: the target's and, with a drafter, the draft's; not those of the running requests."""
        self._max_logprobs = max_logprobs
        self._target = target
        self._drafter = drafter
        self._tables, self._draft_tables = tables[0], tables[-1]
        self._empty = PrefillOutput([], self._tensor([]), self._tensor([]))

    @torch.no_grad()
    def run(self, chunks: Sequence[Chunk]) -> PrefillOutput:
        """Write the chunks' KV; return the requests that these chunks complete."""
        if not chunks:
            return self._empty
        counts = [chunk.end - chunk.start for chunk in chunks]
        texts = [chunk.request.token_ids for chunk in chunks]
        ids = [token for chunk, text in zip(chunks, texts, strict=True) for token in text[chunk.start : chunk.end]]
        _load(self._tables, self._target.groups, chunks)
        states = self._target.prefill(self._tables, counts, [chunk.end for chunk in chunks], self._tensor(ids))
        if self._drafter:
            self._prefill_draft(self._drafter, chunks, texts, states.target_hidden_states.split(counts))
        last = [i for i, chunk in enumerate(chunks) if chunk.last]
        if not last:
            return self._empty
        ends = list(accumulate(counts))
        rows = self._tensor([ends[i] - 1 for i in last])
        logits = self._target.logits(states.hidden[rows])
        tokens = self._next_tokens([(chunks[i], texts[i]) for i in last], logits)
        found = top_logprobs(logits, tokens, self._max_logprobs) if self._max_logprobs else None
        return PrefillOutput([chunks[i].request for i in last], tokens, states.target_hidden_states[rows], found)

    def _next_tokens(self, ends: Sequence[tuple[Chunk, list[int]]], logits: torch.Tensor) -> torch.Tensor:
        """Return the token after each prefill: sampled, or the known next token of a preempted request."""
        params, device = [chunk.request.handle.request.sampling for chunk, _ in ends], self._tables.device
        sampling = Sampling.of(params, device)
        if any(each.edits_logits for each in params):
            edits = LogitEdits.allocate(len(params), logits.shape[1], device)
            edits.load([chunk.request.edits for chunk, _ in ends])
            sampling = sampling._replace(edits=edits)
        positions = self._tensor([chunk.end for chunk, _ in ends])
        sampled = sample_target(logits, sampling=sampling, positions=positions)
        known = self._tensor([text[chunk.end] if chunk.end < len(text) else -1 for chunk, text in ends])
        return torch.where(known >= 0, known, sampled)

    def _prefill_draft(
        self, drafter: Drafter, chunks: Sequence[Chunk], texts: Sequence[list[int]], states: Sequence[torch.Tensor]
    ) -> None:
        """Prefill the draft with token p + 1 and the target's hidden state at p, at position p + position_offset.

        The last token's hidden state waits for the token after it, which the first round provides. A draft with
        position_offset 1 reads the first token at position 0, with a hidden state of zeros.
        """
        shift = drafter.model.position_offset
        rows, ids, parts = [], [], []
        for chunk, text, hidden in zip(chunks, texts, states, strict=True):
            start, end = chunk.start or -shift, min(chunk.end, chunk.request.prefill_len - 1)
            if start < end:
                rows.append(Chunk(chunk.request, start + shift, end + shift))
                ids += text[start + 1 : end + 1]
                parts += [hidden.new_zeros(chunk.start - start, hidden.shape[1])] if start < chunk.start else []
                parts.append(hidden[: end - chunk.start])
        if not rows:
            return
        _load(self._draft_tables, drafter.groups, rows)
        lens, ends = [row.end - row.start for row in rows], [row.end for row in rows]
        drafter.prefill(self._draft_tables, lens, ends, self._tensor(ids), torch.cat(parts))

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return staged(values, self._tables.device)


def _load(tables: RequestTables, groups: Sequence[KVGroup | StateGroup], chunks: Sequence[Chunk]) -> None:
    by_request = [chunk.request.new_pages(groups, 0) for chunk in chunks]
    tables.load([*map(list, zip(*by_request, strict=True))], [chunk.end for chunk in chunks])
