"""The minimum time of a round: the bytes that it moves, and for a block the arithmetic."""

from dataclasses import replace

import pytest
import torch

from attn_backends import get
from benchmarks.flops import FlopCounter
from benchmarks.measure import DeviceRates
from benchmarks.random_drafts import BLOCK_DRAFTS
from benchmarks.rounds import WHOLE, RoundConfig, TimedDraft, round_flops, time_round, weights_of, weights_read
from benchmarks.rows import Bench
from spec_decode.drafter import Strategy
from spec_decode.models.kernels.linear import linear, stacked_linear
from spec_decode.models.kernels.skinny_linear import embed_linear, norm_linear
from spec_decode.models.kernels.streamed_linear import streamed_linear
from spec_decode.models.kernels.streamed_shares import streamed_shares
from spec_decode.models.layers.linear import grouped_gated_linear, grouped_linear
from tests.benchmarks.test_bench_parallel import tiny_block
from tests.benchmarks.test_bench_random_drafts import tiny, weight_bytes
from tests.factories import CPU

REQS, K = 3, 2
BLOCK_ROUND = RoundConfig(get("torch_reference"), Strategy.FULL_LOOP, K, REQS)


def matrices_in(draft):
    """Elements of the weights that a round reads, by name, without vectors."""
    weights = {name: weight for name, weight in weights_of(draft).items() if weight.dim() > 1}
    return {name: weights[name].numel() for name in weights_read(draft, REQS, whole_round=True) if name in weights}


def test_a_parallel_eagle_round_multiplies_2_k_rows_a_request_and_by_the_head_k():
    draft = TimedDraft.of(tiny_block("llama3-8b-peagle"), CPU)
    found = {name: flops for name, flops in round_flops(draft, BLOCK_ROUND, CPU).items() if flops}
    assert found == {
        name: 2 * numel * REQS * (K if name == "head.lm_head.weight" else 2 * K)
        for name, numel in matrices_in(draft.model).items()
    }


def test_a_dflash_round_multiplies_the_block_and_the_verified_tokens_states():
    draft = TimedDraft.of(tiny_block("qwen3-8b-dflash"), CPU)
    found = {name: flops for name, flops in round_flops(draft, BLOCK_ROUND, CPU).items() if flops}
    # 1 + K verified tokens through fc and the keys and values, as many in the block, and the K that are drawn.
    key_and_value = 2 * 64 * 32
    expected = {
        name: 2 * REQS * (1 + K) * (numel + (key_and_value if ".qkv." in name else 0))
        for name, numel in matrices_in(draft.model).items()
    }
    assert found == {**expected, "lm_head": 2 * REQS * K * 64 * 32}


def test_arithmetic_is_counted_without_the_backends_kernels():
    draft = TimedDraft.of(tiny_block("llama3-8b-peagle"), CPU)
    assert round_flops(draft, replace(BLOCK_ROUND, backend=None), CPU) == round_flops(draft, BLOCK_ROUND, CPU)


@pytest.mark.parametrize("name", BLOCK_DRAFTS)
def test_every_matrix_that_a_block_reads_is_multiplied_by(name):
    draft = TimedDraft.of(tiny_block(name), CPU)
    flops = round_flops(draft, BLOCK_ROUND, CPU)
    assert {name for name, each in flops.items() if each} == {*matrices_in(draft.model)}


X = torch.randn(2, 8)
IDS, ENDS = torch.tensor([0, 0]), torch.tensor([0, 1, 1, 2], dtype=torch.int32)


@pytest.mark.parametrize(
    "product, shape, multiplied",
    [
        pytest.param(lambda w: linear(X, w, torch.randn(6)), (6, 8), 6 * 8, id="linear"),
        pytest.param(lambda w: torch.nn.functional.linear(X[:, None], w), (6, 8), 6 * 8, id="torch's"),
        pytest.param(lambda w: linear(X, w[2:4]), (6, 8), 2 * 8, id="a part"),
        pytest.param(lambda w: norm_linear(X, X, torch.ones(8), 1e-5, w, True), (12, 8), 12 * 8, id="skinny"),
        pytest.param(lambda w: embed_linear(IDS, torch.randn(2, 4), X[:, :4], w), (6, 8), 6 * 8, id="embedding"),
        pytest.param(lambda w: streamed_linear(X, w, gated=True), (12, 8), 12 * 8, id="streamed"),
        pytest.param(lambda w: streamed_shares(torch.randn(2, 512), w), (16, 512), 16 * 512, id="shares"),
        pytest.param(lambda w: stacked_linear(torch.randn(2, 3, 8), w), (3, 6, 8), 3 * 6 * 8, id="stacked"),
        pytest.param(lambda w: grouped_linear(X, w, ENDS), (4, 6, 8), 6 * 8, id="experts"),
        pytest.param(lambda w: grouped_gated_linear(X[:1], IDS, w, ENDS), (4, 12, 8), 12 * 8, id="gated experts"),
    ],
)
def test_every_kind_of_product_multiplies_its_two_rows(product, shape, multiplied):
    with FlopCounter({"weight": (weight := torch.randn(shape))}) as counter:
        product(weight)
    assert counter.flops == {"weight": 2 * 2 * multiplied}


@pytest.mark.parametrize("flops_per_us, longer", [(1e12, "bytes"), (1.0, "flops")])
def test_the_floor_of_a_block_is_of_each_weight_the_longer_of_bytes_and_arithmetic(flops_per_us, longer):
    draft = TimedDraft.of(tiny_block("llama3-8b-peagle"), CPU)
    [row] = time_round(Bench(CPU, DeviceRates(1000.0, flops_per_us)), draft, BLOCK_ROUND, {WHOLE: "round"})
    read, flops = weights_read(draft.model, REQS, whole_round=True), round_flops(draft, BLOCK_ROUND, CPU)
    # Norms are never multiplied as matrices: their bytes count.
    weights_us = [flops[name] if longer == "flops" and flops[name] else size / 1000 for name, size in read.items()]
    kv_us = REQS * draft.context * 2 * 64 * 4 * len(draft.layers) / 1000
    assert row["floor_us"] == pytest.approx(sum(weights_us) + kv_us, abs=1e-3)
    assert "or the products with it where these take longer" in row["floor_counts"]


def test_the_floor_of_a_chain_counts_bytes_alone():
    draft = TimedDraft.of(tiny("eagle-1024"), CPU)
    [row] = time_round(Bench(CPU, DeviceRates(1000.0, 1.0)), draft, BLOCK_ROUND, {WHOLE: "round"})
    kv_bytes = REQS * draft.context * 2 * 64 * 4
    assert row["floor_us"] == pytest.approx(K * (weight_bytes(draft.model, REQS) + kv_bytes) / 1000, abs=1e-3)
    assert "products" not in row["floor_counts"]
