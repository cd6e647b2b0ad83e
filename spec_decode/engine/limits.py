"""What an engine can be asked for."""

from __future__ import annotations

from dataclasses import dataclass

from builders import BatchError
from builders.errors import require
from spec_decode.engine.pages import PagePool
from spec_decode.engine.request import Request
from spec_decode.models import DraftModel, TargetModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds of an engine. max_seq_len: prompt and new tokens of a request together."""

    max_seq_len: int
    num_speculative_tokens: int
    vocab_size: int

    @property
    def capacity(self) -> int:
        """Tokens that tables and caches hold of one request."""
        return self.reach(self.max_seq_len)

    def reach(self, length: int) -> int:
        """Tokens that a round may write of a request of that length: the drafts behind it are run over, though none is
        proposed past the end of the text."""
        return length + self.num_speculative_tokens

    def check(self, target: TargetModel, draft: DraftModel | None, max_prefill_tokens: int) -> None:
        """Raise BatchError for models that these bounds, or each other, do not fit."""
        steps = self.num_speculative_tokens
        require(
            steps >= 0 and self.max_seq_len + steps < target.max_positions,
            f"speculative tokens must be 0 or more and leave room below the model's {target.max_positions} positions, "
            f"got {steps} with max_seq_len {self.max_seq_len}; nothing was allocated. Lower either.",
        )
        require(
            max_prefill_tokens >= 1,
            f"a round must prefill 1 token or more, got max_prefill_tokens {max_prefill_tokens}; no prompt would ever "
            "be read, so nothing was allocated. Raise it.",
        )
        if steps == 0:
            return
        require(
            draft is not None,
            f"{steps} speculative tokens need a draft model, got none; nothing was allocated. Pass one, or 0 tokens.",
        )
        assert draft is not None
        size, draft_size = target.target_states_size, draft.target_states_size
        require(
            draft.vocab_size == target.vocab_size
            and draft_size == size
            and self.max_seq_len + steps < draft.max_positions,
            f"a draft must have the target's {target.vocab_size} tokens, read its hidden states of size {size} and "
            f"reach {self.max_seq_len + steps} positions, got {draft.vocab_size}, {draft_size} and "
            f"{draft.max_positions}; nothing was allocated. Choose a draft made for this target.",
        )

    def check_request(self, name: str, request: Request, pool: PagePool) -> None:
        """Raise BatchError for a request that can never be served."""
        prompt, new = len(request.prompt), request.max_new_tokens
        require(
            prompt > 0 and new > 0 and prompt + new <= self.max_seq_len,
            f"{name} needs a prompt and new tokens of at most {self.max_seq_len} together, got {prompt} and {new}; "
            "nothing was run. Shorten it or raise max_seq_len.",
        )
        require(
            all(isinstance(token, int) and 0 <= token < self.vocab_size for token in request.prompt),
            f"{name} must hold token ids, integers 0 to {self.vocab_size - 1}, got {min(request.prompt)} to "
            f"{max(request.prompt)}; nothing was run. Encode it with this model's vocabulary.",
        )
        most = pool.num_pages * pool.page_size - self.num_speculative_tokens
        require(
            pool.pages_for(self.reach(prompt + new)) <= pool.num_pages,
            f"{name} needs prompt and new tokens that fit the {pool.num_pages} pages of {pool.page_size}, at most "
            f"{most} together beside the draft's, got {prompt} and {new}; it would wait for ever, so nothing was run. "
            "Shorten it or raise num_pages.",
        )
        try:
            _ = request.sampling
        except BatchError as error:
            raise BatchError(f"{name} cannot be sampled: {error}") from error
