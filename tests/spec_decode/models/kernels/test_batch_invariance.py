"""The layers of a batch-invariant model on the CPU: every row has the same bits as when it runs alone.

Sizes are odd on purpose. Torch's CPU code rounds differently at another alignment and in the remainder of a vector.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_backends.kernels.add_rms_norm import add_rms_norm
from attn_backends.kernels.linear.linear import gated_linear, linear, stacked_linear
from attn_backends.kernels.linear.skinny_linear import wide_linear
from attn_backends.kernels.linear.swiglu import swiglu
from spec_decode.model_api import batch_invariance
from spec_decode.models.kernels.combine_experts import combine_experts
from spec_decode.models.kernels.hyper_connections import collapse_streams, read_streams, write_streams
from spec_decode.models.kernels.route_tokens import Routing, route_tokens
from spec_decode.models.layers.linear import grouped_gated_linear, grouped_linear

SIZE = st.one_of(st.integers(1, 70), st.sampled_from([127, 255, 511]))


class Draw:
    """Random floats of one dtype."""

    def __init__(self, dtype):
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(0)

    def __call__(self, *shape, dtype=None):
        return torch.randn(*shape, generator=self.generator).to(dtype or self.dtype)


def routing(draw, rows, n, k):
    logits, bias = 3 * draw(rows, n, dtype=torch.float32), draw(n, dtype=torch.float32)
    scoring = ("sigmoid", "softmax", "sqrtsoftplus")[k % 3]
    return lambda x: route_tokens(x, bias, Routing(num_experts=n, top_k=min(n, 5), scoring=scoring)), (logits,)


def experts(draw, rows, n, k):
    top_k, outputs = 1 + k % 5, draw(rows, 1 + k % 5, n)
    weights, shared = draw(rows, top_k, dtype=torch.float32), draw(rows, n)

    def run(outputs, weights, shared):
        places = torch.arange(weights.numel()).view(weights.shape)
        return combine_experts(outputs.flatten(0, 1), weights, places, shared)

    return run, (outputs, weights, shared)


def reading(draw, rows, n, k):
    count = 1 + n % 4
    width = count * (2 + count)
    streams, mixes = draw(rows, count, k), draw(rows, width, dtype=torch.float32)
    scale, base = draw(3, dtype=torch.float32), draw(width, dtype=torch.float32)
    return lambda *x: read_streams(*x, scale, base, iterations=3, eps=1e-6), (streams, mixes)


def collapsing(draw, rows, n, k):
    count = 1 + n % 4
    scale, base = draw(1, dtype=torch.float32), draw(count, dtype=torch.float32)
    streams, mixes = draw(rows, count, k), draw(rows, count, dtype=torch.float32)
    return lambda *x: collapse_streams(*x, scale, base, eps=1e-6), (streams, mixes)


def writing(draw, rows, n, k):
    count = 1 + n % 4
    shares = draw(rows, count, dtype=torch.float32), draw(rows, count, count, dtype=torch.float32)
    return write_streams, (draw(rows, count, k), draw(rows, k), *shares)


def grouped(draw, rows, n, k):
    weight = draw(1, n, k)
    return lambda x: grouped_linear(x, weight, torch.tensor([len(x)], dtype=torch.int32)), (draw(rows, k),)


def grouped_gated(draw, rows, n, k):
    weight = draw(1, 2 * n, k)

    def run(x):
        ends = torch.tensor([len(x)], dtype=torch.int32)
        return grouped_gated_linear(x, torch.arange(len(x)), weight, ends, 0.9)

    return run, (draw(rows, k),)


def row_by(run, *shapes, dtype=None):
    """run(x, *weights) of x [T, K], with a weight of each shape(n, k)."""

    def by_row(draw, rows, n, k):
        weights = [draw(*shape(n, k), dtype=dtype) for shape in shapes]
        return lambda x: run(x, *weights), (draw(rows, k),)

    return by_row


def swiglu_of(limit):
    return lambda draw, rows, n, k: (lambda x: swiglu(x, limit), (3 * draw(rows, 2 * n),))


def stack(draw, rows, n, k):
    weight = draw(3, n, k)
    return lambda x: stacked_linear(x, weight), (draw(rows, 3, k),)


def norm(draw, rows, n, k):
    weight = draw(k)
    return lambda x, delta: add_rms_norm(x, delta, weight, 1e-6), (draw(rows, k), draw(rows, k))


def matrix(n, k):
    return n, k


def gate_and_up(n, k):
    return 2 * n, k


OPS = {
    "product": row_by(linear, matrix),
    "product with a bias": row_by(linear, matrix, lambda n, k: (n,)),
    "products of a stack": stack,
    "product in groups": grouped,
    "product in groups with a gate": grouped_gated,
    "product with a gate": row_by(gated_linear, gate_and_up),
    "product with a bounded gate": row_by(lambda x, weight: gated_linear(x, weight, 0.9), gate_and_up),
    "swiglu": swiglu_of(None),
    "bounded swiglu": swiglu_of(2.0),
    "wide product": row_by(wide_linear, matrix, dtype=torch.float32),
    "wide product of a norm": row_by(lambda *x: wide_linear(*x, norm_eps=1e-6), matrix, dtype=torch.float32),
    "norm": norm,
    "routing": routing,
    "sum of experts": experts,
    "reading of streams": reading,
    "collapse of streams": collapsing,
    "writing of streams": writing,
}


def results(run, inputs):
    out = run(*inputs)
    return out if isinstance(out, tuple) else (out,)


@pytest.mark.parametrize("name", OPS)
@settings(max_examples=30)
@given(n=SIZE, k=SIZE, rows=st.integers(2, 19), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_row_alone_has_same_bits_as_in_batch(name, n, k, rows, dtype):
    run, inputs = OPS[name](Draw(dtype), rows, n, k)
    with batch_invariance(True):
        together = results(run, inputs)
        for t in range(rows):
            alone = results(run, [x[t : t + 1].clone() for x in inputs])
            for whole, part in zip(together, alone, strict=True):
                assert torch.equal(whole[t : t + 1], part), f"row {t} of {rows}"
