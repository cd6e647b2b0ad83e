"""The round of a draft with prediction modules: K modules run in sequence over the same places, one token each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from builders import NO_SLOT, BatchBuffers, RequestTables, advance_state, set_decode_state
from builders.devices import staged
from spec_decode.drafter.kernels.gather_accepted import GatherAccepted, gather_accepted
from spec_decode.drafter.kernels.shift_tokens import shift_tokens
from spec_decode.drafter.plan import DraftPlan
from spec_decode.drafter.steps.step import Step
from spec_decode.model_api import DraftInputs, ModuleDraft
from spec_decode.paged.attention import PagedAttention
from spec_decode.paged.kv_groups import KVGroup, build_ragged
from spec_decode.paged.step_metadata import StepBuffers
from spec_decode.sampling import DraftSampler

_FIRST_SLOT = -NO_SLOT
"""The line of slot 0: tokens without a slot are written to line 0."""


class InputCache:
    """A token and the target's states for every KV slot.

    Indexed by slot and not by row, so it stays valid for a request after a prefill, in another row or in a new run.

    token_ids  int64 [1 + slots]
    states     [1 + slots, F]
    """

    def __init__(self, group: KVGroup, states_size: int, dtype: torch.dtype, device: torch.device) -> None:
        pages = min(cache.num_pages for cache in group.caches.values())
        lines = _FIRST_SLOT + pages * group.spec.page_size
        self.token_ids = torch.zeros(lines, dtype=torch.int64, device=device)
        self.states = torch.zeros(lines, states_size, dtype=dtype, device=device)

    def store(self, slots: torch.Tensor, token_ids: torch.Tensor, states: torch.Tensor) -> None:
        """Store token_ids int64 [T] and states [T, F] at slots int64 [T]; entries without a slot are dropped."""
        lines = slots + _FIRST_SLOT
        self.token_ids.index_copy_(0, lines, token_ids)
        self.states.index_copy_(0, lines, states)

    def load(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of what was stored at slots int64 [T]; entries without a slot are arbitrary but finite."""
        lines = slots + _FIRST_SLOT
        return self.token_ids.index_select(0, lines), self.states.index_select(0, lines)


class ModuleStep(Step[ModuleDraft, DraftSampler]):
    """The only step of a draft with prediction modules. The first module reads the tokens and states that step 0 of any
    draft reads. Each later one reads these tokens shifted by one more place, with the token just drafted at the end,
    and the states of the module before it.

    So the last k - 1 KV entries of module k, up to the last accepted token, come from drafted tokens, which may be
    rejected. No later round reads them: each round starts K - 1 places before its verified tokens and rewrites every
    module's entries from there. A row has 2K places, starting at position 0 if the context is shorter; the places after
    the last accepted token repeat its inputs.

    A prefix that requests share must therefore end K - 1 tokens before the first token in which they differ: see
    `writable_from` of RequestTables.

    inputs_read  InputCache of the first module
    drafting     BatchBuffers of the drafted tokens, for the sampler only; no metadata is built over it
    """

    def _allocate(self, tables: RequestTables, plan: DraftPlan) -> DraftSampler:
        model, device, dtype, reqs = self.model, tables.device, self.groups[0].spec.dtype, tables.max_reqs
        self.drafting = BatchBuffers(tables, max_tokens=reqs)
        self.inputs_read = InputCache(self.groups[0], model.target_states_size, dtype, device)
        self._modules = model.prediction_modules[: self.num_speculative_tokens]
        self._hidden = torch.zeros(reqs, model.hidden_size, dtype=dtype, device=device)
        self._starts, self._last = torch.zeros(2, reqs, dtype=torch.int32, device=device)
        self._places = torch.arange(self.shape.step_0_len, device=device)
        return self._draft_sampler(self.drafting)

    def _place(self, size: int) -> Sequence[tuple[StepBuffers, torch.Tensor]]:
        """See Step. Also finds the place of the last accepted token in each row."""
        context, starts, steps = self.inputs.context_lens[:size], self._starts[:size], self.num_speculative_tokens
        torch.sub(context, steps - 1, out=starts).clamp_(min=0)
        torch.add(self.inputs.accepted[:size].clamp(0, steps), context - starts, out=self._last[:size])
        return [(self.step_0, self._starts)]

    def run_step_0(self, size: int) -> None:
        """Draft K tokens for the first `size` rows.

        Raises BatchError if the draft model returns states of the wrong shape.
        """
        last, batch = self._last[:size], self.drafting
        token_ids, states = self._read_inputs(size)
        with self.products():
            states = self.model.combine(states)
        set_decode_state(batch, self.step_0.batch.seq_lens, last, size, self.step_0.query_len)
        for index, module in enumerate(self._modules):
            if index:
                advance_state(batch, size)
                token_ids = shift_tokens(token_ids.view(size, -1), self.sampler.next_ids, last)
            states = self.forward(size, token_ids, states, module)
            gather_accepted(*GatherAccepted(states, last, out=self._hidden[:size], query_len=self.step_0.query_len))
            self.sampler(self.logits(self._hidden[:size], module))

    def _read_inputs(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cache this round's inputs; return the first module's tokens int64 [size * 2K] and states [size * 2K, F]."""
        inputs, verified = self.inputs, 1 + self.num_speculative_tokens
        slots = self.step_0.batch.slot_mappings[0, : size * self.step_0.query_len].view(size, -1)
        first = inputs.context_lens[:size] - self._starts[:size]
        new = slots.gather(1, first[:, None] + self._places[:verified])
        token_ids = shift_tokens(inputs.token_ids[:size], inputs.next_tokens, inputs.accepted)
        self.inputs_read.store(new.flatten(), token_ids, inputs.target_hidden_states[:size].flatten(0, 1))
        read = torch.minimum(self._places, self._last[:size, None].long())
        return self.inputs_read.load(slots.gather(1, read).flatten())

    def prefill(
        self,
        tables: RequestTables,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        token_ids: torch.Tensor,
        target_hidden_states: torch.Tensor,
    ) -> None:
        """See Step. Every module starts K - 1 places before these tokens. Its entries at the last places, where it
        lacks the tokens that follow, are rewritten by the next part of the prompt or the first round.

        Raises BatchError, with nothing written, for lengths that exceed the tables.
        """
        earlier = self.num_speculative_tokens - 1
        lens = [query + max(0, min(earlier, seq - query)) for query, seq in zip(query_lens, seq_lens, strict=True)]
        batch, metadata = build_ragged(self.groups, tables, lens, seq_lens)
        ends, slots = list(accumulate(lens)), batch.slot_mappings[0]
        new = [place for query, end in zip(query_lens, ends, strict=True) for place in range(end - query, end)]
        self.inputs_read.store(slots[staged(new, slots.device)], token_ids, target_hidden_states)
        token_ids, states = self.inputs_read.load(slots)
        last, attention = staged(ends, slots.device) - 1, PagedAttention(self.groups, metadata)
        with self.products():
            states = self.model.combine(states)
            for index, module in enumerate(self._modules):
                if index:
                    token_ids = token_ids.roll(-1).index_copy(0, last, token_ids[last])
                states = module.forward(DraftInputs(token_ids, states, batch.positions, attention))
