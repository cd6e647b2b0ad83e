import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from builders import BatchError
from spec_decode.sampling.kernels.restrict_logits import restrict_logits
from tests.spec_decode.verification.verify_helpers import law

INF = float("inf")


def restrictions(top_k, top_p, min_p=None):
    min_p = min_p or [0.0] * len(top_k)
    return {
        "top_k": torch.tensor(top_k, dtype=torch.int32), "top_p": torch.tensor(top_p, dtype=torch.float32),
        "min_log_p": torch.tensor(min_p, dtype=torch.float32).log(),
    }  # fmt: skip


def restricted(rows, top_k, top_p, min_p=None):
    logits = torch.as_tensor(rows, dtype=torch.float32).clone()
    restrict_logits(logits, **restrictions(top_k, top_p, min_p))
    return logits


def kept(row, top_k=0, top_p=1.0, min_p=0.0):
    [out] = restricted([row], [top_k], [top_p], [min_p])
    return [index for index, x in enumerate(out.tolist()) if x > -INF]


ROW = [1.0, 4.0, 3.0, 0.0, 2.0]  # shares 0.03, 0.64, 0.23, 0.01, 0.09
CASES = {
    "both off": (ROW, {}, [0, 1, 2, 3, 4]),
    "one token": (ROW, {"top_k": 1}, [1]),
    "three tokens": (ROW, {"top_k": 3}, [1, 2, 4]),
    "as many as there are": (ROW, {"top_k": 5}, [0, 1, 2, 3, 4]),
    "more than there are": (ROW, {"top_k": 2**31 - 1}, [0, 1, 2, 3, 4]),
    "less than the best one's share": (ROW, {"top_p": 0.5}, [1]),
    "next to nothing": (ROW, {"top_p": 1e-30}, [1]),
    "more than the best one's share": (ROW, {"top_p": 0.7}, [1, 2]),
    "nearly all": (ROW, {"top_p": 0.999999}, [0, 1, 2, 3, 4]),
    "a share of what top_k left": (ROW, {"top_k": 2, "top_p": 0.72}, [1]),  # 0.73 of the two, 0.64 of all
    "ties with the kth": ([1.0, 2.0, 1.0, 3.0, 0.0, 1.0], {"top_k": 3}, [0, 1, 2, 3, 5]),
    "ties with the last of top_p": ([1.0, 1.0, 9.0, 1.0, 0.0], {"top_p": 0.999}, [0, 1, 2, 3]),
    "ties of all": ([0.0] * 7, {"top_p": 0.1}, [*range(7)]),
    "a tenth of the best one's share": (ROW, {"min_p": 0.1}, [1, 2, 4]),
    "all that the best one has": (ROW, {"min_p": 1.0}, [1]),
    "as probable as the best one": ([2.0, 1.0, 2.0], {"min_p": 1.0}, [0, 2]),
    "a share of what min_p left": (ROW, {"min_p": 0.2, "top_p": 0.72}, [1]),
    "fewer by top_k than by min_p": (ROW, {"min_p": 0.1, "top_k": 2}, [1, 2]),
    "fewer by min_p than by top_k": (ROW, {"min_p": 0.2, "top_k": 4, "top_p": 0.99}, [1, 2]),
    "tokens that were out": ([-INF, 1.0, -INF, 0.0], {"top_k": 3, "top_p": 0.99}, [1, 3]),
}


@pytest.mark.parametrize(("row", "restriction", "expected"), CASES.values(), ids=CASES)
def test_row_keeps_logits_of_restricted_tokens(row, restriction, expected):
    asked = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **restriction}
    [out] = restricted([row], *([value] for value in asked.values()))
    assert out.tolist() == [x if index in expected else -INF for index, x in enumerate(row)]


def test_every_request_restricts_its_rows():
    out = restricted([ROW] * 6, [1, 0, 0], [1.0, 0.7, 1.0])
    assert (out > -INF).sum(1).tolist() == [1, 1, 2, 2, 5, 5]


def test_garbage_row_leaves_others_alone():
    for garbage in (float("nan"), INF, -INF):
        out = restricted([ROW, [garbage] * 5, ROW], [2, 2, 2], [0.9, 0.9, 0.9])
        assert (out[[0, 2]] > -INF).sum(1).tolist() == [2, 2]


@given(
    row=st.lists(st.integers(-8, 8), min_size=1, max_size=12),
    top_k=st.integers(0, 13),
    top_p=st.one_of(st.just(1.0), st.floats(2**-7, 1 - 2**-7, width=32)),
    min_p=st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.7]),
)
def test_kept_set_is_smallest_that_ties_allow(row, top_k, top_p, min_p):
    halves = [x / 2 for x in row]
    assert (
        kept(halves, top_k, top_p, min_p)
        == law(torch.tensor(halves), 1.0, top_k, top_p, min_p).nonzero()[:, 0].tolist()
    )


REFUSED = {
    "logits of low precision": (torch.zeros(2, 5, dtype=torch.bfloat16), torch.int32, torch.float32, torch.float32),
    "logits of three dimensions": (torch.zeros(2, 1, 5), torch.int32, torch.float32, torch.float32),
    "logits that are a strided view": (torch.zeros(2, 10)[:, :5], torch.int32, torch.float32, torch.float32),
    "rows that are no multiple of the requests": (torch.zeros(3, 5), torch.int32, torch.float32, torch.float32),
    "top_k of 64 bits": (torch.zeros(2, 5), torch.int64, torch.float32, torch.float32),
    "top_p of 64 bits": (torch.zeros(2, 5), torch.int32, torch.float64, torch.float32),
    "min_log_p of 64 bits": (torch.zeros(2, 5), torch.int32, torch.float32, torch.float64),
}


@pytest.mark.parametrize(("logits", "k_dtype", "p_dtype", "m_dtype"), REFUSED.values(), ids=REFUSED)
def test_misread_tensors_are_rejected(logits, k_dtype, p_dtype, m_dtype):
    with pytest.raises(BatchError, match="must be"):
        restrict_logits(
            logits,
            top_k=torch.ones(2, dtype=k_dtype),
            top_p=torch.ones(2, dtype=p_dtype),
            min_log_p=torch.zeros(2, dtype=m_dtype),
        )
    assert not logits.any()


def test_rows_without_a_restriction_are_not_sorted(monkeypatch):
    logits = torch.randn(4, 50)
    before, sort, sorted_rows = logits.clone(), torch.Tensor.sort, []
    monkeypatch.setattr(
        torch.Tensor, "sort", lambda self, *a, **k: sorted_rows.append(len(self)) or sort(self, *a, **k)
    )
    restrict_logits(logits, **restrictions([0, 50], [1, 1]))
    assert not sorted_rows and torch.equal(logits, before)
    restrict_logits(logits, **restrictions([0, 3], [1, 1]))
    assert sorted_rows == [2] and torch.equal(logits[:2], before[:2])
