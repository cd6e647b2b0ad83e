"""The draft's sampler: one token per row and step, written to buffers that a captured step can read."""

from __future__ import annotations

import torch

from builders.errors import require_tensor
from builders.kernels.rows import whole_rows
from spec_decode.sampling.kernels.sample_block import SampleBlock, sample_block
from spec_decode.sampling.kernels.sample_draft import NO_TOKEN, SampleDraft, sample_draft


class DraftSettings:
    """Buffers of R rows at fixed addresses: samplers read them at every step, the caller fills them.

    - temperature  fp32 [R]   0 is greedy
    - seeds        int64 [R]
    - draft_lens   int32 [R]  tokens in sequence that a row proposes; clamped to [0, K]
    - num_tokens   int32 [1]  upper bound on draft_lens for all rows

    Outputs of every sampler: draft_tokens, draft_logits, parents for trees, and

    - continue_flag  int32 [1]  1 if some row still drafts, else 0
    """

    draft_tokens: torch.Tensor
    draft_logits: torch.Tensor
    parents: torch.Tensor | None = None

    def __init__(self, rows: int, num_speculative_tokens: int, device: torch.device) -> None:
        self.temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self.draft_lens = torch.full((rows,), num_speculative_tokens, dtype=torch.int32, device=device)
        self.num_tokens = torch.full((1,), num_speculative_tokens, dtype=torch.int32, device=device)
        self.continue_flag = torch.zeros(1, dtype=torch.int32, device=device)


class DraftSampler(DraftSettings):
    """Samples the draft tokens of each step, and decides which rows draft another.

    Greedy where temperature is 0, else Gumbel-max sampling from softmax(logits / temperature). All buffers have fixed
    addresses. R rows, K speculative tokens, V tokens of the target.

    Inputs, read at every step and filled by the caller: DraftSettings, and

    - min_confidence  fp32 [1]         a row stops after a token with a lower probability under the softmax of the
                                       processed logits; 0 stops no row and costs nothing

    Outputs:

    - draft_tokens    int64 [R, K]     the token goes to column `step`. Column 0 starts a round: it sets the others to
                                       NO_TOKEN
    - draft_logits    fp32 [R, K, V]   the processed logits, divided by a positive temperature, go to column `step`
    - next_ids        int64 [R]        the token as the next step's input
    - continue_flag   int32 [1]        1 if some row drafts another token, else 0

    After its last token a row gets seq_len 0, without an overflow, and is inert from then on. A row with seq_len 0, or
    with no token left to propose, gets NO_TOKEN, and 0 as its next input. A step after column K - 1 writes no column.
    """

    def __init__(
        self,
        seq_lens: torch.Tensor,
        positions: torch.Tensor,
        step: torch.Tensor,
        *,
        num_speculative_tokens: int,
        vocab_size: int,
        token_map: torch.Tensor | None = None,
        min_confidence: float = 0.0,
        num_candidates: int | None = None,
    ) -> None:
        """Allocate the buffers; seq_lens, positions and step are the batch's tensors, read at every step.

        - seq_lens    int32 [R], also written: 0 for a row that stops
        - positions   int64 [>= R], of the draft's inputs
        - step        int64 [1], the column to write
        - vocab_size  V, tokens of the target
        - token_map   int64 [V of the draft], the target id of each token that the draft's logits score. Tokens stored
                      and fed back are target ids. Columns of draft_logits that the map does not name stay -inf. Noise
                      is indexed by target id: the draw equals one over the whole vocabulary with -inf for tokens that
                      the draft lacks, except that among equal logits the first in the draft's order wins
        - num_candidates  W, tokens that `select_block` draws from at each place; None: it is not called. draft_logits
                      are then -inf for all other tokens

        Raises BatchError for a token_map of the wrong shape, dtype or device.
        """
        rows, columns, device = len(seq_lens), num_speculative_tokens, seq_lens.device
        if token_map is not None:
            require_tensor("token_map", token_map, shape=(None,), dtype=torch.int64, device=device)
        self._draft_vocab = vocab_size if token_map is None else len(token_map)
        super().__init__(rows, columns, device)
        self.min_confidence = torch.full((1,), min_confidence, dtype=torch.float32, device=device)
        self.draft_tokens = torch.zeros(rows, columns, dtype=torch.int64, device=device)
        self.draft_logits = torch.zeros(rows, columns, vocab_size, dtype=torch.float32, device=device)
        if token_map is not None or num_candidates is not None:
            self.draft_logits.fill_(float("-inf"))
        self.next_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions, self._step, self._token_map = positions, step, token_map
        # What the ops of all three ways to sample take.
        self._rows = {
            "temperature": self.temperature,
            "seeds": self.seeds,
            "seq_lens": seq_lens,
            "draft_tokens": self.draft_tokens,
            "draft_logits": self.draft_logits,
            "draft_lens": self.draft_lens,
            "num_tokens": self.num_tokens,
            "min_confidence": self.min_confidence,
        }
        # The tokens whose logits the last round wrote, for the next one to reset.
        self._scored = torch.zeros(rows, columns, num_candidates or 0, dtype=torch.int64, device=device)

    def __call__(
        self, logits: torch.Tensor, hidden: torch.Tensor | None = None, next_hidden: torch.Tensor | None = None
    ) -> None:
        """Sample the tokens of the first rows in place; device work only.

        - logits       [rows, V of the draft] any float, rows up to R
        - hidden       [rows, H] the step's hidden states
        - next_hidden  [>= rows, H] of the same dtype, where the next step reads them. None copies nothing; a separate
          copy kernel would cost a device loop 2 us at every step

        Raises BatchError, with nothing run, for tensors of the wrong shape, dtype or device.
        """
        rows, device = len(logits), self.next_ids.device
        require_tensor("logits", logits, shape=(rows, self._draft_vocab), dtype=logits.dtype, device=device)
        if hidden is not None and next_hidden is not None:
            next_hidden = next_hidden[:rows]
            for name, tensor in {"hidden": hidden, "next_hidden": next_hidden}.items():
                require_tensor(name, tensor, shape=(rows, hidden.shape[1]), dtype=hidden.dtype, device=device)
            hidden = whole_rows(hidden)
        arguments = SampleDraft(
            logits=whole_rows(logits),
            positions=self._positions,
            step=self._step,
            next_ids=self.next_ids,
            **self._rows,
            continue_flag=self.continue_flag,
            token_map=self._token_map,
            hidden=hidden,
            next_hidden=next_hidden,
        )
        sample_draft(*arguments)

    def sample_block(self, logits: torch.Tensor, positions: torch.Tensor) -> None:
        """Sample all K tokens of the first rows at once, in place, without reading `step`; device work only.

        - logits     [rows * K, V of the draft] any float: column k of row r at r * K + k
        - positions  int64 [rows * K], of the draft input that each column predicts from

        Does not change seq_lens, next_ids or continue_flag. Raises BatchError, with nothing run, for tensors of the
        wrong shape, dtype or device.
        """
        lines, device = len(logits), self.next_ids.device
        require_tensor("logits", logits, shape=(lines, self._draft_vocab), dtype=logits.dtype, device=device)
        require_tensor("positions", positions, shape=(lines,), dtype=torch.int64, device=device)
        arguments = SampleBlock(
            logits=whole_rows(logits),
            positions=positions.contiguous(),
            **self._rows,
            token_map=self._token_map,
        )
        sample_block(*arguments)

    def select_block(
        self,
        logits: torch.Tensor,
        candidates: torch.Tensor,
        gates: torch.Tensor,
        codebooks: tuple[torch.Tensor, torch.Tensor],
        next_tokens: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Sample the K tokens of the first rows in sequence, in place, without reading `step`; device work only. A
        token is drawn from the candidates of its place only, and verified against the distribution it was drawn from.

        - logits       [rows * K, V] any float: column k of row r at r * K + k
        - candidates   int64 [rows * K, W], the tokens that can be drawn in each column
        - gates        [rows * K, N] any float
        - codebooks    [V, N] of predecessors and of successors, contiguous: see CandidateTable
        - next_tokens  int64 [>= rows], the token before column 0
        - positions    int64 [rows * K], of the draft input that each column predicts from

        Does not change seq_lens, next_ids or continue_flag. Raises BatchError, with nothing run, for tensors of the
        wrong shape, dtype or device.
        """
        # Loaded here, because few drafts have candidates.
        from spec_decode.sampling.kernels.select_candidates import SelectCandidates, select_candidates

        width, device, lines = self._scored.shape[2], self.next_ids.device, len(logits)
        vocab = self.draft_logits.shape[2]
        require_tensor("logits", logits, shape=(lines, vocab), dtype=logits.dtype, device=device)
        require_tensor("candidates", candidates, shape=(lines, width), dtype=torch.int64, device=device)
        require_tensor("gates", gates, shape=(lines, None), dtype=gates.dtype, device=device)
        for name, codebook in zip(("predecessors", "successors"), codebooks, strict=True):
            require_tensor(name, codebook, shape=(vocab, gates.shape[1]), dtype=codebook.dtype, device=device)
        require_tensor("next_tokens", next_tokens, shape=(None,), dtype=torch.int64, device=device)
        require_tensor("positions", positions, shape=(lines,), dtype=torch.int64, device=device)
        arguments = SelectCandidates(
            logits=whole_rows(logits),
            candidates=candidates.contiguous(),
            gates=whole_rows(gates),
            predecessors=codebooks[0],
            successors=codebooks[1],
            next_tokens=next_tokens.contiguous(),
            positions=positions.contiguous(),
            scored=self._scored,
            **self._rows,
        )
        select_candidates(*arguments)


__all__ = ["NO_TOKEN", "DraftSampler"]
