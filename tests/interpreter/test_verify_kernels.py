"""Kernels of verification and of target sampling, for cases outside the table of ops."""

import math

import pytest
import torch

from builders.kernels.triton_runtime import torch_implementations
from spec_decode.sampling import Sampling, SamplingParams
from spec_decode.sampling.target_sampler import process_target_logits, sample_target
from spec_decode.verification.kernels.block_verify import block_verify
from spec_decode.verification.kernels.rejection_sample import rejection_sample
from spec_decode.verification.kernels.verify_arguments import VerifyArguments
from tests.ops.sample import TABLE, noise
from tests.ops.sampling import SHAPES
from tests.spec_decode.verification.verify_helpers import sampling_of
from tests.spec_decode.verification.verify_oracle import Case, block_oracle, rejection_oracle

OPS = {"rejection": rejection_sample, "block": block_verify}
ORACLES = {"rejection": rejection_oracle, "block": block_oracle}


@pytest.mark.parametrize("op", ["rejection_sample", "block_verify"])
def test_samples_cover_every_kind_of_output(op):
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_after_vocabulary_is_not_sampled(temperature):
    wide = torch.full((3, 601), math.inf)
    wide[:, :600] = noise(3, 600)
    logits, zeros = wide[:, :600], torch.zeros(3, dtype=torch.int64)
    sampling = sampling_of(3, temperature, seeds=zeros)
    found = sample_target(logits, sampling=sampling, positions=zeros)
    assert torch.equal(found, sample_target(logits.contiguous(), sampling=sampling, positions=zeros))
    assert found.lt(599).all()


def test_strided_parameters_apply_per_row():
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m, seed=at)
        for at, (t, k, p, m) in enumerate(
            [(1.0, 3, 1, 0), (0, 0, 1, 0), (0.5, 0, 0.3, 0), (2.0, 0, 1, 0), (1.0, 1, 1, 0), (1.0, 0, 1, 0.4)]
        )
    ]
    wide = Sampling(*(tensor.repeat_interleave(2)[::2] for tensor in Sampling.of(params, "cpu").rows))
    columns, logits = torch.tensor([[0, 9], [1, 9], [2, 9]]).repeat(2, 1)[:, 0], noise(6, 3, 40)
    place = {"positions": columns.contiguous(), "column": columns}
    assert not any(tensor.is_contiguous() for tensor in (*wide.rows, columns))
    found = process_target_logits(logits, wide, columns), sample_target(logits, sampling=wide, **place)
    with torch_implementations():
        wanted = process_target_logits(logits, wide, columns), sample_target(logits, sampling=wide, **place)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("name", OPS)
def test_every_output_matches_its_noise(name):
    case = Case(1)
    seeds = torch.arange(len(case.rows))
    case.check(case.run(OPS[name], seeds), ORACLES[name], seeds)
