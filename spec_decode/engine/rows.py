"""What the device knows of the running requests, and how a pass of the target moves it on.

Legend: R rows, K draft tokens, V vocabulary, F target states' size. Everything here stays at its address; `inputs`
and `settle` run inside the target's graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch

from spec_decode.drafter import Drafter
from spec_decode.engine.kernels.prepare_inputs import prepare_inputs
from spec_decode.engine.kernels.update_requests import DraftInputs, RequestTensors, update_requests
from spec_decode.engine.request import Request
from spec_decode.sampling import Sampling, sample_target
from spec_decode.verification import Verifier, VerifyOutput


class Rows:
    """One row for each running request, in the order of the tables.

    lens         int64 [R]       tokens of prompt and text; the last of them is in no cache yet; padding rows are 0
    max_lens     int64 [R]       where the text ends; padding rows are 0, so that they never grow
    last_tokens  int64 [R]
    sampling     R rows
    outputs      int64 [R, 2 + K]   of the last step: draft tokens kept, these tokens, and the target's own after them
    """

    def __init__(self, max_reqs: int, device: torch.device, verifier: Verifier, drafter: Drafter | None) -> None:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        self._verifier = verifier
        self._drafter = drafter
        self._steps = drafter.num_speculative_tokens if drafter else 0
        self.lens, self.max_lens, self.last_tokens = zeros(max_reqs), zeros(max_reqs), zeros(max_reqs)
        self.sampling = Sampling.allocate(max_reqs, device)
        self.outputs = zeros(max_reqs, 2 + self._steps)

    def inputs(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens in the target's cache, int32 [size]; and the last token with the draft's behind it, int64
        [size, 1 + K]."""
        return prepare_inputs(self.lens[:size], self.last_tokens[:size], self._drafts(size))

    def settle(self, token_ids: torch.Tensor, logits: torch.Tensor, target_hidden_states: torch.Tensor) -> None:
        """Judge the drafts by the target's logits [size, 1 + K, V], lengthen the texts, and tell drafter and host.

        token_ids int64 [size, 1 + K] are the pass's, target_hidden_states [size, 1 + K, F] for the drafter. A text
        that is complete stays as long as it is.
        """
        rows = slice(0, len(token_ids))
        self._move_on(rows, token_ids, target_hidden_states, self._judge(logits, self.lens[rows]))

    def _drafts(self, size: int) -> torch.Tensor:
        """Draft tokens int64 [size, K], -1 from where a row proposes none."""
        return self._drafter.drafts.tokens[:size] if self._drafter else self.outputs[:size, :0]

    def _judge(self, logits: torch.Tensor, lens: torch.Tensor) -> VerifyOutput:
        size = len(lens)
        sampling = self.sampling.head(size)
        if self._drafter is None:
            own = sample_target(logits[:, 0], sampling=sampling, positions=lens)
            return VerifyOutput(torch.zeros_like(own), own)
        drafts = self._drafter.drafts
        return self._verifier.verify(
            logits, drafts.tokens[:size], drafts.logits[:size], sampling=sampling, draft_positions=lens
        )

    def _move_on(
        self, rows: slice, token_ids: torch.Tensor, target_hidden_states: torch.Tensor, verdict: VerifyOutput
    ) -> None:
        """Lengthen the texts, and let the drafter's next round start from this pass over token_ids."""
        drafter, drafts = self._drafter, self._drafts(rows.stop)[rows]
        texts = RequestTensors(self.lens[rows], self.max_lens[rows], self.last_tokens[rows], self.outputs[rows])
        if drafter is None:
            update_requests(verdict.accepted, verdict.next_tokens, token_ids, drafts, texts, None)
            return
        inputs = drafter.inputs
        next_round = DraftInputs(*(getattr(inputs, name)[rows] for name in DraftInputs._fields))
        first = drafter.model.position_offset
        update_requests(
            verdict.accepted, verdict.next_tokens, token_ids, drafts, texts, next_round, position_offset=first
        )
        inputs.target_hidden_states[rows].copy_(target_hidden_states)
        inputs.seeds[rows].copy_(self._verifier.draft_seeds(self.sampling.seeds[rows], self.lens[rows]))

    def seat(self, requests: Sequence[Request], stay: Sequence[int]) -> None:
        """Let row i be what row stay[i] was, the rows behind them be the newcomers', and all others padding.

        requests: of all rows. Newcomers' rows are filled by `join`.
        """
        order = torch.tensor(stay, dtype=torch.int64, device=self.lens.device)
        moved = [self.lens, self.last_tokens]
        if self._drafter:
            moved += [getattr(self._drafter.inputs, field.name) for field in fields(self._drafter.inputs)]
        for tensor in moved:
            tensor[: len(stay)] = tensor.index_select(0, order)
        self.lens[len(stay) :].zero_()
        self.max_lens.zero_()
        self.max_lens[: len(requests)] = torch.tensor([request.max_len for request in requests])
        self.sampling.load([request.sampling for request in requests])
        if self._drafter:
            self._drafter.inputs.temperature.copy_(self.sampling.temperature)

    def join(self, first: int, lens: Sequence[int], tokens: torch.Tensor, target_hidden_states: torch.Tensor) -> None:
        """Fill the newcomers' rows, from row `first` on, as if a pass had just kept no draft.

        lens: tokens in the target's cache; tokens int64 [n]: the one behind them; target_hidden_states [n, F]: there.
        """
        rows = slice(first, first + len(lens))
        self.lens[rows].copy_(torch.tensor(lens, dtype=torch.int64, device=self.lens.device))
        # Behind the first token of such a pass, nothing is read: neither its id nor its hidden state.
        ids, wide = (
            tokens[:, None].expand(-1, self._steps + 1),
            target_hidden_states[:, None].expand(-1, self._steps + 1, -1),
        )
        self._move_on(rows, ids, wide, VerifyOutput(torch.zeros_like(tokens), tokens))
