import pytest
import torch

from builders import BatchError
from spec_decode.sampling.target_sampler import draw_target_tokens, process_target_logits
from tests.spec_decode.verification.verify_helpers import sampling_of

ROWS, VOCAB = 3, 7
ZEROS = torch.zeros(ROWS, dtype=torch.int64)
REFUSED = {
    "flat logits": lambda: process_target_logits(torch.zeros(ROWS, VOCAB), sampling_of(ROWS)),
    "temperatures of fewer rows": lambda: process_target_logits(torch.zeros(ROWS, 1, VOCAB), sampling_of(1)),
    "a column of int32": lambda: process_target_logits(torch.zeros(ROWS, 1, VOCAB), sampling_of(ROWS), ZEROS.int()),
    "a draw from bfloat16": lambda: draw_target_tokens(
        torch.zeros(ROWS, 1, VOCAB).bfloat16(), sampling_of(ROWS, 1.0), ZEROS
    ),
    "a draw at no position": lambda: draw_target_tokens(
        torch.zeros(ROWS, 1, VOCAB), sampling_of(ROWS, 1.0), torch.zeros(0, dtype=torch.int64)
    ),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_wrong_tensors_are_refused(call):
    with pytest.raises(BatchError, match=r"must be torch\..* nothing was run"):
        call()


def test_only_the_column_asked_for_is_processed():
    logits, sampling = torch.arange(12.0).view(2, 3, 2), sampling_of(2)
    sampling.temperature[0] = 2.0
    assert process_target_logits(logits, sampling, torch.tensor([2, 0])).tolist() == [[[2, 2.5]], [[6, 7]]]


def test_processed_logits_are_a_tensor_of_their_own():
    logits = torch.zeros(1, 1, VOCAB)
    process_target_logits(logits, sampling_of(1)).fill_(1)
    assert not logits.any()
