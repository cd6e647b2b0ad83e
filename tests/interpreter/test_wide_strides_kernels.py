"""The kernels' address arithmetic over views that 32 bits do not reach across."""

from tests.attn_backends.kernels.test_wide_strides import check_wide, each_wide_dim
from tests.spec_decode.sampling.test_wide_logits_strides import check_wide_tokens, each_reader
from tests.spec_decode.verification.test_wide_draft_strides import check_wide_drafts, each_op_and_dim


@each_wide_dim
def test_numbers_more_than_two_to_the_31_apart_are_found(op, shapes, name, dim, tmp_path):
    check_wide(op, shapes, name, dim, "cpu", tmp_path)


@each_op_and_dim
def test_draft_logits_more_than_two_to_the_31_apart_are_found(op, dim, tmp_path):
    check_wide_drafts(op, dim, "cpu", tmp_path)


@each_reader
def test_tokens_more_than_two_to_the_31_apart_are_found(read, tmp_path):
    check_wide_tokens(read, "cpu", tmp_path)
