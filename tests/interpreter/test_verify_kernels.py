"""Kernels of verification and of the target's sampling: what the table of ops does not ask."""

import math

import pytest
import torch

from builders.kernels.triton_runtime import torch_implementations
from spec_decode.sampling import Sampling
from spec_decode.sampling.kernels.draw_tokens import draw_tokens
from spec_decode.sampling.kernels.process_logits import process_logits
from spec_decode.sampling.target_sampler import process_target_logits, sample_target
from spec_decode.verification.kernels.block_verify import block_verify
from spec_decode.verification.kernels.rejection_sample import rejection_sample
from spec_decode.verification.kernels.verify_arguments import VerifyArguments
from tests.ops.sample import TABLE, int32, noise, whole
from tests.ops.sampling import SHAPES
from tests.spec_decode.verification.verify_oracle import Case, block_oracle, rejection_oracle

OPS = {"rejection": rejection_sample, "block": block_verify}
ORACLES = {"rejection": rejection_oracle, "block": block_oracle}


def both_ways(call):
    by_kernel = call()
    with torch_implementations():
        return by_kernel, call()


@pytest.mark.parametrize("op", ["rejection_sample", "block_verify"])
def test_the_samples_give_outputs_of_every_kind(op):
    kinds = set()
    for sample in TABLE[f"spec_decode::{op}"].samples[: len(SHAPES)]:
        arguments = VerifyArguments(*sample)
        with torch_implementations():
            accepted = TABLE[f"spec_decode::{op}"].call(*sample)[0]
        length = (arguments.draft_tokens >= 0).long().cumprod(1).sum(1)
        for kept, proposed, temperature in zip(accepted, length, arguments.temperature, strict=True):
            ended = kept == proposed and proposed < arguments.draft_tokens.shape[1]
            kinds.add("ended" if ended else (bool(kept < proposed), bool(temperature > 0)))
    assert len(kinds) == 5


def test_only_rows_that_are_restricted_are_processed():
    logits, top_p = noise(5, 2, 40), torch.tensor([1.0, 1, 0.5, 1, 1])
    top_k = int32(0, 3, 0, 40, 39)

    def call():
        out = process_logits(logits, torch.full((5,), 2.0), None, top_k, top_p)
        return out[[1, 2, 4]]

    by_kernel, by_torch = both_ways(call)
    assert torch.equal(by_kernel, by_torch) and torch.equal(by_kernel, logits[[1, 2, 4]] / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("selected", [False, True])
@pytest.mark.parametrize("vocab", [37, 2000])
def test_the_targets_tokens(vocab, selected, dtype):
    logits = noise(6, 3, 2 * vocab, dtype=dtype)[..., ::2]
    sampling = Sampling(
        temperature=torch.tensor([0.0, 1.0, 0.5] * 2), top_k=int32(0, 0, vocab, 5, 0, 7),
        top_p=torch.tensor([1.0, 1, 1, 1, 0.5, 0.5]), seeds=whole(-(2**63), 2**63 - 1, 6),
    )  # fmt: skip
    positions, column = whole(0, 2**40, 6, seed=2), torch.tensor([2, 0, 1] * 2)

    def call():
        if selected:
            return sample_target(logits, sampling=sampling, positions=positions, column=column)
        return sample_target(logits[:, 0], sampling=sampling, positions=positions)

    picked = logits[torch.arange(6), column if selected else 0][:, None].contiguous()
    processed = process_target_logits(picked, sampling)[:, 0]
    by_kernel, by_torch = both_ways(call)
    assert torch.equal(by_kernel, by_torch)
    assert torch.equal(by_kernel, draw_tokens(processed, sampling.temperature, sampling.seeds, positions))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_beyond_the_vocabulary_is_not_drawn(temperature):
    wide = torch.full((3, 601), math.inf)
    wide[:, :600] = noise(3, 600)
    logits, zeros = wide[:, :600], torch.zeros(3, dtype=torch.int64)
    sampling = Sampling(torch.full((3,), temperature), zeros.int(), torch.ones(3), zeros)
    found = sample_target(logits, sampling=sampling, positions=zeros)
    assert torch.equal(found, sample_target(logits.contiguous(), sampling=sampling, positions=zeros))
    assert found.lt(599).all()


@pytest.mark.parametrize("name", OPS)
def test_every_output_is_what_the_noise_says(name):
    case = Case(1)
    seeds = torch.arange(len(case.rows))
    case.check(case.run(OPS[name], seeds), ORACLES[name], seeds)
