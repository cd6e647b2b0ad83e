"""Sample one draft token per request, file it under the column of the device step, and say who drafts on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from builders.errors import require_tensor
from builders.kernels.op_by_schema import define_op_by_schema
from builders.kernels.triton_runtime import dependent_launch, triton
from spec_decode.sampling import noise
from spec_decode.sampling.kernels.sample_draft_kernels import block_argmax_kernel, file_token_kernel

NO_TOKEN = -1
"""Draft token of a row that proposes nothing: padding, a request that could not advance, or one that has stopped."""

_PARTS = 64
"""Programs that a row is shared out to, at least, within the bounds below: one row alone must occupy a device."""

_BOUNDS = (512, 4096)
"""The fewest and the most logits of a program."""

_POSITION_AHEAD = 2  # a draft input at position p stands for token p + 1 and predicts token p + 2


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRule:
    """When a row stops drafting, and whether any goes on; device memory at fixed addresses, read at every step.

    draft_lens      int32 [>= R]   tokens a row proposes this round; below 1 none, above K as many as K
    num_tokens      int32 [1]      the most that any row proposes this round
    min_confidence  fp32 [1]       a row stops behind a token whose probability under softmax of the processed logits is
                                   lower than this; 0 stops none, and costs nothing
    continue_flag           int32 [1]      written: 1 if some row goes on behind this token, else 0
    """

    draft_lens: torch.Tensor
    num_tokens: torch.Tensor
    min_confidence: torch.Tensor
    continue_flag: torch.Tensor

    @staticmethod
    def allocate(rows: int, columns: int, device: torch.device, *, min_confidence: float = 0.0) -> StopRule:
        """A rule by which every row fills every column, but for the confidence asked for."""
        return StopRule(
            draft_lens=torch.full((rows,), columns, dtype=torch.int32, device=device),
            num_tokens=torch.full((1,), columns, dtype=torch.int32, device=device),
            min_confidence=torch.full((1,), min_confidence, dtype=torch.float32, device=device),
            continue_flag=torch.zeros(1, dtype=torch.int32, device=device),
        )


def sample_draft(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    step: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_logits: torch.Tensor,
    next_ids: torch.Tensor,
    stop: StopRule | None = None,
    token_map: torch.Tensor | None = None,
    feed_back: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Greedy where temperature is 0, else Gumbel-max sampling from softmax(logits / temperature); in place.

    logits [R, V] any float; temperature fp32, seeds, positions int64 and seq_lens int32, each [>= R]; step int64 [1].
    Column step of draft_tokens int64 [>= R, K] gets the token, of draft_logits fp32 [>= R, K, V] the processed logits
    (divided by a positive temperature), and next_ids int64 [>= R] the token as the next step's input. Column 0 begins
    a round: it sets the row's other columns of draft_tokens to NO_TOKEN. A step past column K - 1 files nothing.

    stop: None lets every row fill every column. A row that has filed its last token gets seq_len 0 and so is inert
    from there on, without an overflow. A row with seq_len 0, or no token left to propose, gets NO_TOKEN, and 0 as its
    next input.
    token_map: int64 [V], the target's id of each token that the logits score, where draft_logits has the target's
    vocabulary, [>= R, K, V_target]. Tokens filed and fed back are target ids; the columns of draft_logits that the map
    does not name are not written. Noise goes by target id, so that the draw is that of the whole vocabulary with
    -inf for the tokens which the draft lacks; of equal logits the first in the draft's order wins.
    feed_back: the step's hidden states [R, H] and where the next step reads them, [>= R, H]: copied here, since a
    kernel for that alone would cost a loop on the device 2 us at every step.
    """
    rows, vocab = logits.shape
    columns = draft_tokens.shape[1]
    shape = (None, columns, vocab if token_map is None else None)
    require_tensor("draft_logits", draft_logits, shape=shape, dtype=torch.float32, device=logits.device)
    if token_map is not None:
        require_tensor("token_map", token_map, shape=(vocab,), dtype=torch.int64, device=logits.device)
    hidden = next_hidden = None
    if feed_back is not None:
        hidden, next_hidden = feed_back[0], feed_back[1][:rows]
        for name, tensor in {"hidden": hidden, "next_hidden": next_hidden}.items():
            require_tensor(name, tensor, shape=(rows, hidden.shape[1]), dtype=hidden.dtype, device=logits.device)
    stop = stop or StopRule.allocate(rows, columns, logits.device)
    _sample_op(
        logits,
        temperature[:rows],
        seeds[:rows],
        positions[:rows],
        seq_lens[:rows],
        step,
        draft_tokens,
        draft_logits,
        next_ids,
        stop.draft_lens[:rows],
        stop.num_tokens,
        stop.min_confidence,
        stop.continue_flag,
        token_map,
        hidden,
        next_hidden,
    )


def _sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    step: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_logits: torch.Tensor,
    next_ids: torch.Tensor,
    draft_lens: torch.Tensor,
    num_tokens: torch.Tensor,
    min_confidence: torch.Tensor,
    continue_flag: torch.Tensor,
    token_map: torch.Tensor | None,
    hidden: torch.Tensor | None,
    next_hidden: torch.Tensor | None,
) -> None:
    rows, vocab = logits.shape
    column, columns = int(step), draft_tokens.shape[1]
    ids = torch.arange(vocab) if token_map is None else token_map
    hot = temperature > 0
    processed = logits.float() / torch.where(hot, temperature, 1.0)[:, None]
    keys = noise.key(seeds, positions + _POSITION_AHEAD, noise.DRAFT)
    perturbed = processed + noise.gumbel(keys[:, None], ids[None])
    chosen = torch.where(hot[:, None], perturbed, processed).argmax(-1)
    lengths = draft_lens.clamp(max=num_tokens).clamp(max=columns)
    proposes = (seq_lens > 0) & (column < lengths)
    goes_on = proposes & (column + 1 < lengths)
    if min_confidence > 0:
        goes_on &= processed.softmax(-1).gather(1, chosen[:, None])[:, 0] >= min_confidence
    if column == 0:
        draft_tokens[:rows] = NO_TOKEN
    if column < columns:
        draft_logits[:rows, column, ids] = processed
        draft_tokens[:rows, column] = torch.where(proposes, ids[chosen], NO_TOKEN)
    next_ids[:rows] = torch.where(proposes, ids[chosen], 0)
    seq_lens *= goes_on
    continue_flag.fill_(goes_on.any())
    if hidden is not None and next_hidden is not None:
        next_hidden.copy_(hidden)


def _launch(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    step: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_logits: torch.Tensor,
    next_ids: torch.Tensor,
    draft_lens: torch.Tensor,
    num_tokens: torch.Tensor,
    min_confidence: torch.Tensor,
    continue_flag: torch.Tensor,
    token_map: torch.Tensor | None,
    hidden: torch.Tensor | None,
    next_hidden: torch.Tensor | None,
) -> None:
    rows, vocab = logits.shape
    columns = draft_tokens.shape[1]
    block = logits_of_a_program(vocab)
    blocks = triton.cdiv(vocab, block)
    parts = torch.empty(3, rows, blocks, dtype=torch.float32, device=logits.device)
    index = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    mapping = step if token_map is None else token_map
    width = 0 if hidden is None or next_hidden is None else hidden.shape[1]
    block_argmax_kernel[(rows, blocks)](
        logits,
        temperature,
        seeds,
        positions,
        step,
        draft_logits,
        *parts,
        index,
        min_confidence,
        continue_flag,
        mapping,
        hidden,
        next_hidden,
        vocab,
        columns,
        logits.stride(0),
        *draft_logits.stride()[:2],
        0 if hidden is None else hidden.stride(0),
        0 if next_hidden is None else next_hidden.stride(0),
        STREAM=noise.DRAFT,
        AHEAD=_POSITION_AHEAD,
        MAPPED=token_map is not None,
        WIDTH=width,
        SHARE=triton.next_power_of_2(triton.cdiv(width, blocks)),
        BLOCK=block,
        # Four logits a thread: noise costs so much arithmetic that few threads, not memory, would set the pace.
        num_warps=max(1, min(8, block // 128)),
        **dependent_launch(logits.device),
    )
    file_token_kernel[(rows,)](
        logits,
        temperature,
        *parts,
        index,
        seq_lens,
        step,
        draft_tokens,
        next_ids,
        draft_lens,
        num_tokens,
        min_confidence,
        continue_flag,
        mapping,
        vocab,
        logits.stride(0),
        draft_tokens.stride(0),
        columns,
        blocks,
        MAPPED=token_map is not None,
        BLOCK=triton.next_power_of_2(blocks),
        BLOCK_K=triton.next_power_of_2(columns),
        num_warps=1,
        **dependent_launch(logits.device),
    )


def logits_of_a_program(vocab: int) -> int:
    """A power of two, by which a row of a vocabulary is shared out."""
    fewest, most = _BOUNDS
    share = 1 << (max(1, vocab // _PARTS).bit_length() - 1)
    block: int = min(max(fewest, min(most, share)), triton.next_power_of_2(vocab))
    return block


_sample_op = define_op_by_schema(
    "spec_decode::sample_draft",
    "(Tensor logits, Tensor temperature, Tensor seeds, Tensor positions, Tensor(a!) seq_lens, Tensor step, "
    "Tensor(b!) draft_tokens, Tensor(c!) draft_logits, Tensor(d!) next_ids, Tensor draft_lens, Tensor num_tokens, "
    "Tensor min_confidence, Tensor(e!) continue_flag, Tensor? token_map, Tensor? hidden, Tensor(f!)? next_hidden) -> ()",
    cpu=_sample,
    cuda=_launch,
)
