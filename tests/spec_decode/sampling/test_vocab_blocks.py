import pytest

from spec_decode.sampling.kernels.vocab_blocks import vocab_block


@pytest.mark.parametrize("vocab", [32000, 32768, 50257, 128256, 151936, 201088, 262144])
def test_large_vocabulary_is_divided_over_many_programs(vocab):
    assert 62 <= vocab // vocab_block(vocab) <= 128


@pytest.mark.parametrize(("vocab", "block"), [(1, 1), (24, 32), (513, 512), (10**6, 4096)])
def test_vocab_block_is_bounded_by_row_and_maximum(vocab, block):
    assert vocab_block(vocab) == block
