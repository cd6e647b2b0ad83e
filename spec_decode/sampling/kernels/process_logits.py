"""Logits as they are sampled from: in fp32, over the temperature."""

from __future__ import annotations

import torch

from builders.errors import require_tensor
from builders.kernels.op_by_schema import define_op_by_schema
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from spec_decode.sampling.draft import logits_of_a_program


def process_logits(logits: torch.Tensor, temperature: torch.Tensor, column: torch.Tensor | None = None) -> torch.Tensor:
    """logits / temperature fp32 [R, G, V], contiguous, of logits [R, G, V] any float and temperature fp32 [R].

    Temperature 0, which is greedy, leaves logits as they are. column int64 [R], 0 to G - 1: of each row only this one,
    [R, 1, V]. Raises BatchError for tensors of another shape, dtype or device.
    """
    rows, device = len(temperature), logits.device
    require_tensor("logits", logits, shape=(rows, None, None), dtype=logits.dtype, device=device)
    require_tensor("temperature", temperature, shape=(rows,), dtype=torch.float32, device=device)
    if column is not None:
        require_tensor("column", column, shape=(rows,), dtype=torch.int64, device=device)
    out: torch.Tensor = _process_op(logits, temperature, column)
    return out


def _formula(logits: torch.Tensor, temperature: torch.Tensor, column: torch.Tensor | None) -> torch.Tensor:
    if column is not None:
        logits = logits[torch.arange(len(logits)), column][:, None]
    return (logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None, None]).contiguous()


def _launch(logits: torch.Tensor, temperature: torch.Tensor, column: torch.Tensor | None) -> torch.Tensor:
    out = _fake(logits, temperature, column)
    rows, group, vocab = out.shape
    block = logits_of_a_program(vocab)
    _process_kernel[(rows * group, triton.cdiv(vocab, block))](
        logits,
        temperature,
        column,
        out,
        group,
        vocab,
        *logits.stride(),
        PICKED=column is not None,
        BLOCK=block,
        num_warps=max(1, min(8, block // 256)),
        **dependent_launch(logits.device),
    )
    return out


def _fake(logits: torch.Tensor, temperature: torch.Tensor, column: torch.Tensor | None) -> torch.Tensor:
    rows, group, vocab = logits.shape
    return logits.new_empty(rows, group if column is None else 1, vocab, dtype=torch.float32)


@triton.jit
def _process_kernel(
    logits,
    temperature,
    picked,
    out,
    group,
    vocab,
    row_stride,
    column_stride,
    token_stride,
    PICKED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    line = tl.program_id(0).to(tl.int64)
    row, column = line // group, line % group
    if PICKED:
        column = tl.load(picked + row)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    x = tl.load(logits + row * row_stride + column * column_stride + token * token_stride, mask=inside)
    heat = tl.load(temperature + row)
    x = x.to(tl.float32)
    if heat > 0:
        x = tl.div_rn(x, heat)
    tl.store(out + line * vocab + token, x, mask=inside)


_process_op = define_op_by_schema(
    "spec_decode::process_logits",
    "(Tensor logits, Tensor temperature, Tensor? column) -> Tensor",
    cpu=_formula,
    cuda=_launch,
    fake=_fake,
)
