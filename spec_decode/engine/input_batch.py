"""The running requests on the device, one row each.

Legend: R rows, K draft tokens, F size of a target hidden state. Every tensor keeps its address, since graphs hold it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from builders.devices import stage_into, staged
from builders.errors import require_tensor
from spec_decode.drafter import Drafter, VerifiedTokens
from spec_decode.engine.kernels.prepare_inputs import prepare_inputs
from spec_decode.engine.kernels.update_requests import UpdateRequests, update_requests
from spec_decode.engine.request import RequestState
from spec_decode.sampling import Sampling
from spec_decode.sampling.logit_edits import LogitEdits
from spec_decode.sampling.target_sampler import TopLogprobs, top_logprobs
from spec_decode.verification import Verifier, VerifyOutput


class InputBatch:
    """One row for each running request, in the order of the tables.

    lens         int64 [R]          tokens of prompt and text; the last one is not cached yet; 0 for padding rows
    max_lens     int64 [R]          where the text ends; 0 for padding rows, so they never grow
    last_tokens  int64 [R]
    sampling     R rows
    outputs      int64 [R, 2 + K]   of the last step: number of accepted draft tokens, these, the target's next token;
                                    -1 as in VerifyOutput
    logprobs     [R, 1 + K, 1 + N]  of these tokens; None without max_logprobs
    """

    def __init__(
        self,
        max_reqs: int,
        device: torch.device,
        vocab_size: int,
        drafter: Drafter | None,
        verifier: Verifier | None,
        max_logprobs: int = 0,
    ) -> None:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        self._drafter = drafter
        self._verifier = verifier
        self._query_len = 1 + (drafter.num_speculative_tokens if drafter else 0)
        self.lens, self.max_lens, self.last_tokens = zeros(max_reqs), zeros(max_reqs), zeros(max_reqs)
        self.edits = LogitEdits.allocate(max_reqs, vocab_size, device)
        self.sampling = Sampling.allocate(max_reqs, device)._replace(edits=self.edits)
        self._edited: list[bool] = []  # by row: whether its edits are written
        self.outputs = zeros(max_reqs, 1 + self._query_len)
        self.logprobs: TopLogprobs | None = None
        if max_logprobs:
            self.logprobs = TopLogprobs.allocate(max_reqs, self._query_len, 1 + max_logprobs, device=device)

    def prepare_inputs(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the target's context lengths, int32 [size], and the token ids to run, the last token and the drafts,
        int64 [size, 1 + K], or [size, 1 + N] for a tree."""
        rows = slice(size)
        context_lens, token_ids = prepare_inputs(self.lens[rows], self.last_tokens[rows], self.drafts(rows))
        return context_lens, token_ids

    def update_requests(self, rows: slice, token_ids: torch.Tensor, drafts: torch.Tensor, output: VerifyOutput) -> None:
        """Extend these n rows by the tokens that a step over token_ids, int64 [n, 1 + K], accepted; write `outputs` and
        the drafter's token inputs. A row with a complete text keeps its length.

        drafts: int64 [n, K], the proposed part of token_ids; -1 after the last proposed token.

        Raises BatchError, with nothing written, for an output of the wrong shape, dtype or device.
        """
        accepted, next_tokens, lens = output.accepted.contiguous(), output.next_tokens.contiguous(), self.lens[rows]
        require_tensor("accepted", accepted, shape=lens.shape, dtype=torch.int64, device=lens.device)
        require_tensor("next_tokens", next_tokens, shape=lens.shape, dtype=torch.int64, device=lens.device)
        arguments = UpdateRequests(
            accepted=accepted,
            next_tokens=next_tokens,
            token_ids=token_ids,
            drafts=drafts,
            lens=lens,
            max_lens=self.max_lens[rows],
            last_tokens=self.last_tokens[rows],
            outputs=self.outputs[rows],
            position_offset=self._drafter.model.position_offset if self._drafter else 0,
            penalties=self.edits.penalties[rows],
            counts=self.edits.counts[rows],
            **(_token_inputs(self._drafter.inputs, rows) if self._drafter else {}),
        )
        update_requests(*arguments)

    def set_logprobs(self, rows: slice, logits: torch.Tensor) -> None:
        """Write the logprobs of these rows' `outputs`, drawn from logits [n, 1 + K, V], if logprobs are on."""
        if self.logprobs is not None:
            found = top_logprobs(logits, self.outputs[rows, 1:], self.logprobs.ids.shape[-1] - 1)
            for kept, new in zip(self.logprobs, found, strict=True):
                kept[rows].copy_(new)

    def set_draft_inputs(self, rows: slice, target_hidden_states: torch.Tensor) -> None:
        """Write the drafter's other inputs for these n rows: target_hidden_states [n, 1 + K, F], and the seeds."""
        if self._drafter is not None:
            inputs = self._drafter.inputs
            inputs.target_hidden_states[rows].copy_(target_hidden_states)
            # Tree verification needs no draft noise.
            if self._verifier is not None:
                inputs.seeds[rows].copy_(self._verifier.draft_seeds(self.sampling.seeds[rows], self.lens[rows]))

    def condense(self, kept_rows: Sequence[int], new: Sequence[RequestState]) -> None:
        """Move row kept_rows[i] to row i; the rows after them are for the new requests, the rest is padding.

        `add` fills the rows of the new requests.
        """
        order, kept = staged(kept_rows, self.lens.device), len(kept_rows)
        moved = [self.lens, self.max_lens, self.last_tokens, *self.sampling.rows]
        if self._drafter is not None:
            inputs = self._drafter.inputs
            moved += [*_token_inputs(inputs, slice(None)).values(), inputs.target_hidden_states, inputs.seeds]
        for tensor in moved:
            tensor[:kept] = tensor.index_select(0, order)
        self.lens[kept:].zero_()
        self.max_lens[kept:].zero_()
        stage_into(self.max_lens[kept : kept + len(new)], [request.max_len for request in new])
        self.sampling.tail(kept).load([request.handle.request.sampling for request in new])
        self._condense_edits(order, kept_rows, new)
        if self._drafter is not None:
            self._drafter.inputs.temperature.copy_(self.sampling.temperature)

    def _condense_edits(self, order: torch.Tensor, kept_rows: Sequence[int], new: Sequence[RequestState]) -> None:
        """Do for the edits as `condense` does; nothing if no request has or had any."""
        kept, had_edits = len(kept_rows), any(self._edited)
        self._edited = [self._edited[row] for row in kept_rows]
        self._edited += [request.handle.request.sampling.edits_logits for request in new]
        if had_edits or any(self._edited):
            for tensor in self.edits:
                tensor[:kept] = tensor.index_select(0, order)
            self.edits.tail(kept).load([request.edits for request in new])

    def add(self, first: int, lens: Sequence[int], tokens: torch.Tensor, target_hidden_states: torch.Tensor) -> None:
        """Fill n rows from row `first` on with prefilled requests, as if a step had just accepted no draft token.

        lens                  tokens in the target's cache
        tokens                int64 [n], the token after them; -1 as in VerifyOutput
        target_hidden_states  [n, F], at the last token in the cache
        """
        rows = slice(first, first + len(lens))
        stage_into(self.lens[rows], lens)
        # With no draft token accepted, the drafter reads none of them, only the next tokens.
        token_ids = tokens[:, None].expand(-1, self._query_len)
        self.update_requests(rows, token_ids, token_ids[:, 1:], VerifyOutput(torch.zeros_like(tokens), tokens))
        self.set_draft_inputs(rows, target_hidden_states[:, None].expand(-1, self._query_len, -1))

    def drafts(self, rows: slice) -> torch.Tensor:
        """Return draft tokens int64 [n, K], or [n, N] for a tree, -1 after a row's last."""
        return self.outputs[rows, :0] if self._drafter is None else self._drafter.drafts.tokens[rows]


def _token_inputs(inputs: VerifiedTokens, rows: slice) -> dict[str, torch.Tensor]:
    """Return the drafter inputs that `update_requests` writes, by its names for them."""
    assert inputs.draft_lens is not None, "a drafter's own buffers have draft_lens"
    return {
        "draft_token_ids": inputs.token_ids[rows],
        "draft_context_lens": inputs.context_lens[rows],
        "draft_accepted": inputs.accepted[rows],
        "draft_next_tokens": inputs.next_tokens[rows],
        "draft_lens": inputs.draft_lens[rows],
    }
