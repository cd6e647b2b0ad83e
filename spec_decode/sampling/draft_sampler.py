"""The draft's sampler: one token per row and step, written to buffers that a captured step can read."""

from __future__ import annotations

import torch

from builders.errors import require_tensor
from builders.kernels.rows import whole_rows
from spec_decode.sampling.kernels.sample_block import sample_block
from spec_decode.sampling.kernels.sample_draft import NO_TOKEN, sample_draft


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
        if token_map is not None:
            self.draft_logits.fill_(float("-inf"))
        self.next_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        # The op's arguments between logits and hidden states, collected once, since the op runs at every step.
        self._buffers = (
            self.temperature,
            self.seeds,
            positions,
            seq_lens,
            step,
            self.draft_tokens,
            self.draft_logits,
            self.next_ids,
            self.draft_lens,
            self.num_tokens,
            self.min_confidence,
            self.continue_flag,
            token_map,
        )

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
        sample_draft(whole_rows(logits), *self._buffers, hidden, next_hidden)

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
        logits, positions = whole_rows(logits), positions.contiguous()
        temperature, seeds, _, seq_lens, _, tokens, draft_logits, _, lens, num_tokens, confidence, _, ids = (
            self._buffers
        )
        sample_block(
            logits, temperature, seeds, positions, seq_lens, tokens, draft_logits, lens, num_tokens, confidence, ids
        )


__all__ = ["NO_TOKEN", "DraftSampler"]
