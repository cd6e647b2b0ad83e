"""The target's sampler: its processed logits, and a token drawn from them."""

from __future__ import annotations

import torch

from builders.errors import require_tensor
from spec_decode.sampling.kernels.draw_tokens import draw_tokens
from spec_decode.sampling.kernels.process_logits import process_logits
from spec_decode.sampling.kernels.restrict_logits import restrict_logits
from spec_decode.sampling.parameters import Sampling


def sample_target(logits: torch.Tensor, *, sampling: Sampling, positions: torch.Tensor) -> torch.Tensor:
    """The sampler of plain decoding: one token int64 [R] per row.

    - logits     [R, V] any float
    - sampling   R rows
    - positions  int64 [R], the absolute positions of the tokens

    Raises BatchError for tensors of another shape, dtype or device.
    """
    return draw_target_tokens(process_target_logits(logits[:, None], sampling), sampling, positions)


def process_target_logits(logits: torch.Tensor, sampling: Sampling, column: torch.Tensor | None = None) -> torch.Tensor:
    """Logits over the temperature, -inf outside top_k and top_p; fp32 [R, G, V], or [R, 1, V] of one column.

    - logits    [R, G, V] any float
    - sampling  R rows
    - column    int64 [R], 0 to G - 1: process only this column of each row; None processes all

    A restriction never removes a row's largest logits, so greedy rows sample the same tokens with one.
    Raises BatchError for tensors of another shape, dtype or device.
    """
    temperature, device = sampling.temperature, logits.device
    rows = len(temperature)
    require_tensor("logits", logits, shape=(rows, None, None), dtype=logits.dtype, device=device)
    require_tensor("temperature", temperature, shape=(rows,), dtype=torch.float32, device=device)
    if column is not None:
        require_tensor("column", column, shape=(rows,), dtype=torch.int64, device=device)
    out = process_logits(logits, temperature, column)
    restrict_logits(out.flatten(0, 1), top_k=sampling.top_k, top_p=sampling.top_p)
    return out


def draw_target_tokens(processed: torch.Tensor, sampling: Sampling, positions: torch.Tensor) -> torch.Tensor:
    """One token int64 [R] per row.

    - processed  fp32 [R, 1, V], processed logits
    - sampling   R rows
    - positions  int64 [R], the absolute positions of the tokens

    Raises BatchError for tensors of another shape, dtype or device.
    """
    rows, device = len(processed), processed.device
    require_tensor("processed", processed, shape=(rows, 1, None), dtype=torch.float32, device=device)
    require_tensor("temperature", sampling.temperature, shape=(rows,), dtype=torch.float32, device=device)
    for name, tensor in {"seeds": sampling.seeds, "positions": positions}.items():
        require_tensor(name, tensor, shape=(rows,), dtype=torch.int64, device=device)
    return draw_tokens(
        processed[:, 0].contiguous(), sampling.temperature, sampling.seeds.contiguous(), positions.contiguous()
    )
