import pytest
import torch

from builders import BatchError
from spec_decode.graphs import runtime_for
from spec_decode.sampling import Sampling
from spec_decode.verification import BlockVerification, RejectionSampling, SyntheticAcceptance, verifier
from spec_decode.verification.kernels.verify_arguments import VerifyArguments
from tests.spec_decode.verification.verify_helpers import sampling_of

ROWS, STEPS, VOCAB = 64, 3, 9
NAMES = ["rejection", "block", "synthetic:1.5"]
KNOWN = {
    "rejection": RejectionSampling,
    "block": BlockVerification,
    "synthetic:0": SyntheticAcceptance,
    "synthetic:3": SyntheticAcceptance,
    "synthetic:2.25": SyntheticAcceptance,
}


def test_verifier_is_chosen_by_name_with_default_rejection():
    assert {name: type(verifier(name, num_speculative_tokens=STEPS)) for name in KNOWN} == KNOWN
    assert type(verifier(num_speculative_tokens=STEPS)) is RejectionSampling


@pytest.mark.parametrize("name", ["", "greedy", "Block", "synthetic"])
def test_unknown_verifier_is_rejected_with_known_ones(name):
    with pytest.raises(BatchError, match=f"one of rejection, block, synthetic:MEAN, got '{name}'"):
        verifier(name, num_speculative_tokens=STEPS)


@pytest.mark.parametrize("mean", ["", "many", "-0.1", "3.01", "nan", "inf", "-inf", "1,5"])
def test_impossible_synthetic_mean_is_rejected_with_limit(mean):
    with pytest.raises(BatchError, match=f"from 0 to 3, .* got 'synthetic:{mean}'.*synthetic:1.5"):
        verifier(f"synthetic:{mean}", num_speculative_tokens=STEPS)


def inputs(seed):
    """A batch of greedy, random and restricted rows, drafts whole, cut short and empty."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS, STEPS + 1, VOCAB, generator=generator) * 2
    draft_logits = logits[:, :STEPS] + torch.randn(ROWS, STEPS, VOCAB, generator=generator) / 2
    tokens = torch.where(torch.arange(ROWS)[:, None] % 2 == 0, logits[:, :STEPS].argmax(-1), draft_logits.argmax(-1))
    ends = torch.randint(0, 2 * STEPS, (ROWS, 1), generator=generator)
    return {
        "target_logits": logits,
        "draft_tokens": tokens.masked_fill(torch.arange(STEPS) == ends, -1),
        "draft_logits": draft_logits,
        "temperature": torch.rand(ROWS, generator=generator).mul(2).sub(0.5).clamp(min=0),
        "top_k": torch.randint(-VOCAB, VOCAB, (ROWS,), generator=generator, dtype=torch.int32).clamp(min=0),
        "top_p": torch.rand(ROWS, generator=generator).mul(2).clamp(0.01, 1),
        "min_log_p": torch.rand(ROWS, generator=generator).sub(0.5).clamp(min=0).log(),
        "seeds": torch.randint(-(2**62), 2**62, (ROWS,), generator=generator),
        "draft_positions": torch.randint(0, 2**20, (ROWS,), generator=generator),
    }


def output_of(how, batch):
    sampling = Sampling(**{field: batch[field] for field in ("temperature", "top_k", "top_p", "min_log_p", "seeds")})
    logits = {name: batch[name] for name in ("target_logits", "draft_tokens", "draft_logits")}
    return how.verify(**logits, sampling=sampling, draft_positions=batch["draft_positions"])


def pair(output):
    return output.accepted.tolist(), output.next_tokens.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_captured_verification_replays_over_other_batches(name):
    how, buffers = verifier(name, num_speculative_tokens=STEPS), inputs(0)
    out = []

    def verify():
        out.append((output_of(how, buffers), how.draft_seeds(buffers["seeds"], buffers["draft_positions"])))

    graph = runtime_for(torch.device("cpu")).capture(verify)
    for seed in (1, 2, 3):
        for buffer, fresh in zip(buffers.values(), inputs(seed).values(), strict=True):
            buffer.copy_(fresh)
        graph.replay()
        output, draft_seeds = out[0]
        assert pair(output) == pair(output_of(how, inputs(seed)))
        assert torch.equal(draft_seeds, how.draft_seeds(buffers["seeds"], buffers["draft_positions"]))


@pytest.mark.parametrize("name", NAMES)
def test_output_does_not_depend_on_batch_order(name):
    how, batch = verifier(name, num_speculative_tokens=STEPS), inputs(5)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    there, here = output_of(how, batch), output_of(how, {key: x[order] for key, x in batch.items()})
    assert torch.equal(here.accepted, there.accepted[order]) and torch.equal(here.next_tokens, there.next_tokens[order])


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_of_one_token_is_verified(name):
    batch = inputs(6)
    batch |= {key: batch[key][:, :1] for key in ("draft_tokens", "draft_logits")}
    batch["target_logits"] = batch["target_logits"][:, :2]
    output = output_of(verifier(name, num_speculative_tokens=STEPS), batch)
    assert output.accepted.unique().tolist() == [0, 1]
    assert ((output.next_tokens >= 0) & (output.next_tokens < VOCAB)).all()


def test_rejection_drafts_with_request_seeds():
    seeds = torch.arange(5)
    assert verifier(num_speculative_tokens=STEPS).draft_seeds(seeds, seeds + 3) is seeds


def test_block_verification_uses_new_seeds_per_round():
    seeds = torch.full((1000,), 4)
    assert len(BlockVerification().draft_seeds(seeds, torch.arange(1000)).unique()) == 1000


def zeros(*shape, dtype=torch.int64):
    return torch.zeros(*shape, dtype=dtype)


def verify_arguments(**changed):
    fields = {
        "processed": torch.zeros(ROWS, STEPS + 1, VOCAB), "draft_tokens": zeros(ROWS, STEPS),
        "draft_logits": torch.zeros(ROWS, STEPS, VOCAB), "temperature": torch.ones(ROWS), "seeds": zeros(ROWS),
        "accept_seeds": zeros(ROWS), "draft_positions": zeros(ROWS),
    }  # fmt: skip
    return VerifyArguments(**fields | changed)


WRONG = {
    "processed": torch.zeros(ROWS, STEPS, VOCAB),
    "draft_tokens": zeros(ROWS, STEPS, dtype=torch.int32),
    "draft_logits": torch.zeros(ROWS, STEPS, VOCAB, device="meta"),
    "temperature": torch.ones(ROWS + 1),
    "seeds": torch.zeros(ROWS),
    "accept_seeds": zeros(1),
    "draft_positions": zeros(ROWS, 1),
}


@pytest.mark.parametrize(("name", "tensor"), WRONG.items(), ids=WRONG)
def test_wrong_verify_arguments_are_rejected_by_name(name, tensor):
    with pytest.raises(BatchError, match=f"^{name} must be .* on cpu, got"):
        verify_arguments(**{name: tensor}).checked()


def test_one_dimensional_drafts_are_rejected_by_name():
    with pytest.raises(BatchError, match=r"^draft_tokens must be torch\.int64 \[None, None\]"):
        verify_arguments(draft_tokens=zeros(ROWS)).checked()


def test_drafts_without_columns_are_rejected():
    empty = {"processed": torch.zeros(ROWS, 1, VOCAB), "draft_logits": torch.zeros(ROWS, 0, VOCAB)}
    with pytest.raises(BatchError, match=r"draft_tokens must have at least one column.*draw .* with sample_target"):
        verify_arguments(draft_tokens=zeros(ROWS, 0), **empty).checked()


def test_checked_arguments_are_contiguous_except_draft_logits():
    wide = torch.zeros(ROWS, 2 * STEPS, 2 * VOCAB)[:, :STEPS, ::2]
    seeds, tokens = zeros(2 * ROWS)[::2], zeros(ROWS, 2 * STEPS)[:, ::2]
    checked = verify_arguments(draft_logits=wide, draft_tokens=tokens, seeds=seeds, accept_seeds=seeds).checked()
    assert checked.draft_logits is wide
    assert all(tensor.is_contiguous() for tensor in checked if tensor is not wide)


def test_draft_positions_must_be_int64():
    right, positions = verify_arguments(), zeros(ROWS, dtype=torch.int32)
    drafts = right.processed, right.draft_tokens, right.draft_logits
    with pytest.raises(BatchError, match=r"^draft_positions must be torch\.int64"):
        SyntheticAcceptance(1.0).verify(*drafts, sampling=sampling_of(ROWS), draft_positions=positions)
    with pytest.raises(BatchError, match=r"^draft_positions must be torch\.int64"):
        BlockVerification().draft_seeds(right.seeds, positions)
