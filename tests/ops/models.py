"""Samples of the ops of models."""

from itertools import product

import torch

import attn_backends.kernels.add_rms_norm
import attn_backends.kernels.linear.batch_invariant_linear
import attn_backends.kernels.linear.linear_op
import attn_backends.kernels.linear.narrow_rows
import attn_backends.kernels.linear.streamed_shares
import attn_backends.kernels.linear.swiglu
import attn_backends.kernels.linear.top_tokens  # noqa: F401
import spec_decode.models.layers.delta_net  # noqa: F401
from attn_backends.kernels.linear.fp8_weight import Fp8Weight, operands
from tests.attn_backends.kernels.linear import skinny_oracle, streamed_oracle
from tests.ops.sample import CLOSE, each, noise, op
from tests.spec_decode.models.kernels import mixture_oracle
from tests.spec_decode.models.kernels.hyper_oracle import EPS, make_case

DTYPES = [torch.float32, torch.float16]


def with_nan(inputs, *names):
    """Set the second row or token to NaN."""
    for name in names or ("x",):
        getattr(inputs, name)[1] = torch.nan
    return inputs


# The interpreter truncates to bf16, once for each result.
@op("attn_backends::add_rms_norm", close={**CLOSE, torch.bfloat16: {"rtol": 2**-6, "atol": 1e-5}}, strided="x")
def add_rms_norm():
    for width in (20, 1, 64, 300):
        for dtype in (*DTYPES, torch.bfloat16):
            x, weight = noise(4, width, dtype=dtype), noise(width, seed=1, dtype=dtype)
            yield x, x.flip(0), weight, 1e-6
            yield x, None, weight, 1e-6
    yield noise(4, 48, dtype=DTYPES[1]), noise(4, 48, seed=2, dtype=DTYPES[1]), noise(48, seed=1), 1e-6
    for shares in (1, 3):
        for dtype in DTYPES:
            yield noise(4, 48, dtype=dtype), noise(shares, 4, 48), noise(48, seed=1, dtype=dtype), 1e-6
    for view in (lambda x: x[:, 1], lambda x: x[:, 1:3], lambda x: x[:, :, ::2], lambda x: x.mT):
        x = view(noise(5, 4, 6))
        yield x, None, noise(x.shape[-1], seed=1), 1e-6


@op("spec_decode::sigmoid_gate", close=CLOSE, strided="x gate")
def sigmoid_gate():
    for width, dtype, gates in each((40, 1, 3000), DTYPES, (None, 1)):
        yield noise(3, width, dtype=dtype), noise(3, gates or width, seed=1, dtype=dtype) * 5


@op("spec_decode::delta_gates", close=CLOSE, strided="projected")
def delta_gates():
    for heads, dtype in each((3, 1, 32), DTYPES):
        projected = noise(4, 2 * heads, dtype=dtype) * 6
        yield projected, noise(heads, seed=1), noise(heads, seed=2)
    # Decays of nearly 0, and steps of which softplus is the identity.
    steps = torch.tensor([[-80.0, -30.0, -17.0, -16.0, 19.9, 20.1, 90.0]])
    yield torch.cat([steps, steps], 1), torch.zeros(7), torch.zeros(7)


@op("spec_decode::norm_and_gate", close=CLOSE, strided="gate")
def norm_and_gate():
    for heads, dim, dtype in each((3, 1), (20, 1, 64), DTYPES):
        x, gate = noise(4, heads, dim, dtype=dtype), noise(4, heads * dim, seed=1, dtype=dtype) * 5
        yield x, gate, noise(dim, seed=2, dtype=dtype), 1e-6


@op("attn_backends::swiglu", close=CLOSE, strided="gate_up")
def swiglu():
    kinds = ((None, None, False), (0.7, None, False), (None, 1.7, False), (0.7, 1.7, False), (None, None, True))
    for width, dtype, kind in each((40, 2, 3000), DTYPES, kinds):
        yield noise(3, width, dtype=dtype), *kind
    nan = noise(1, 8)
    nan[0, [1, 6]] = torch.nan
    yield nan, 0.7, 1.7, False


@op("spec_decode::block_convolution", close=CLOSE, strided="x change")
def block_convolution():
    for taps, length, (width, groups), dtype in each(
        (2, 1, 5), (4, 1, 7), ((48, 12), (6, 6), (6, 1), (3000, 3)), DTYPES
    ):
        # Of both sides' changes, the second's.
        changes = noise(2 * length, 2, taps, groups, seed=1, dtype=dtype)
        yield noise(2 * length, width, dtype=dtype), noise(taps, width, seed=2, dtype=dtype), changes[:, 1], length
    x, changes = noise(8, 12), noise(8, 3, 4, seed=1)
    x[:4], changes[:4] = torch.nan, torch.nan
    yield x, noise(3, 12, seed=2), changes, 4


@op("spec_decode::embed_concat", close=CLOSE, strided="hidden")
def embed_concat():
    ids = torch.tensor([3, 0, 3])
    for width in (20, 1, 64, 1500):
        for dtype in DTYPES:
            table, hidden = noise(5, width, dtype=dtype), noise(3, width, seed=1, dtype=dtype)
            norms = [noise(width, seed=2, dtype=dtype), noise(2 * width, seed=3, dtype=dtype)[width:]]
            yield ids, table, hidden, [], 0.0
            yield ids, table, hidden, norms, 1e-6
            yield ids, table, hidden, [norm.float() for norm in norms], 1e-6


@op("spec_decode::mla_query_key", close=CLOSE, strided="absorbed rotated latent")
def mla_query_key():
    positions = torch.tensor([0, 31, 7])
    for heads, dims, rotary in ((5, 24, 8), (1, 2, 2), (3, 20, 6)):
        for dtype in DTYPES:
            absorbed = noise(heads, 3, dims, dtype=dtype).transpose(0, 1)
            rotated = noise(3, heads, 4 + rotary, seed=1, dtype=dtype)[..., 4:]
            latent = noise(3, 9 + dims + rotary, seed=2, dtype=dtype)[:, 9:]
            yield absorbed, rotated, latent, noise(dims, seed=3), positions, noise(32, rotary, seed=4).cos(), 1e-6


@op("spec_decode::route_tokens", close={torch.float32: {"rtol": 3e-6, "atol": 0}})
def route_tokens():
    def routed(logits, bias, logit_bias=None, **routing):
        return logits, bias, *{**mixture_oracle.PLAIN, **routing}.values(), logit_bias

    for experts, routing in mixture_oracle.ROUTINGS.values():
        for tokens in (5, 1):
            yield routed(noise(tokens, experts), noise(experts, seed=1) / 4, **routing)
            yield routed(noise(tokens, experts), noise(experts, seed=1) / 4, noise(experts, seed=2), **routing)
    far = torch.tensor([[-40.0, -17.0, -12.0, -8.0, -5.0, 0.0, 5.0, 17.0, 40.0]])
    for scoring in mixture_oracle.SCORE:
        yield routed(far, torch.arange(9.0), scoring=scoring, normalised=False, top_k=9)
    yield routed(torch.zeros(2, 70), torch.zeros(70), top_k=16)
    yield routed(torch.zeros(1, 15), torch.zeros(15), groups=5, top_groups=2, top_k=6)
    yield routed(noise(1, 6), torch.full((6,), -torch.inf).index_fill(0, torch.tensor([4]), 0.0))


@op("spec_decode::order_by_expert")
def order_by_expert():
    for experts, count in mixture_oracle.ORDERS.values():
        yield torch.tensor(experts), count
    yield torch.zeros(0, 3, dtype=torch.int64), 5


@op("spec_decode::combine_experts")
def combine_experts():
    for shared in (True, False):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for sizes in ((5, 1, 70), (1, 4, 1), (3, 3, 600)):
                yield mixture_oracle.combine_inputs(*sizes, dtype, shared=shared)
    rows, weights, places, shared = mixture_oracle.combine_inputs(3, 2, 40, torch.float32, shared=True)
    rows[places[1]] = torch.nan
    yield rows, weights, places, shared


@op("spec_decode::read_streams", close=CLOSE, strided="streams mixes")
def read_streams():
    for streams, hidden, dtype in each((4, 1, 2, 3), (50, 1, 1100), (torch.float32, torch.float16)):
        case = make_case(streams=streams, hidden=hidden, dtype=dtype)
        yield case.streams, case.mixes, case.scale, case.base, 20, EPS
    for iterations in (1, 2):
        yield case.streams, case.mixes, case.scale, case.base, iterations, EPS
    for streams, hidden, dtype in product((1, 3, 4), (50, 1100), DTYPES):
        head = make_case(streams=streams, hidden=hidden, dtype=dtype)
        yield head.streams, *head.head, 0, EPS
    for case in (with_nan(make_case(), "streams", "mixes", "output"), make_case(tokens=0)):
        yield case.streams, case.mixes, case.scale, case.base, 20, EPS
    far = make_case(tokens=1)
    yield far.streams, torch.tensor([[300.0, -300.0, 0.0, 300.0] * 6]), far.scale * 0 + 1, far.base * 0, 20, EPS


@op("spec_decode::write_streams", close=CLOSE, strided="streams output")
def write_streams():
    for streams, hidden, dtype in each((4, 1, 3), (50, 1, 1024, 1100), (torch.float32, torch.float16)):
        case = make_case(streams=streams, hidden=hidden, dtype=dtype)
        yield case.streams, case.output, noise(3, streams), noise(3, streams, streams, seed=1)
    for case in (with_nan(make_case(), "streams", "mixes", "output"), make_case(tokens=0)):
        tokens = len(case.output)
        yield case.streams, case.output, noise(tokens, 4), noise(tokens, 4, 4, seed=1)


SUMS = {dtype: {"rtol": 2 * close["rtol"], "atol": 2e-2 if dtype.itemsize == 2 else 1e-4}
        for dtype, close in CLOSE.items()}  # fmt: skip


@op("attn_backends::skinny_linear", close=SUMS, strided="x")
def skinny_linear():
    for form in skinny_oracle.FORMS:
        yield tuple(skinny_oracle.make_inputs(form, 2, 21, 40).arguments())
        yield tuple(with_nan(skinny_oracle.make_inputs(form, 2, 18, 50).arguments()))
    for form in skinny_oracle.NARROW:
        clean, spoilt = (skinny_oracle.make_inputs(form, 2, 21, 40, torch.bfloat16).in_8_bits() for _ in range(2))
        yield tuple(clean.arguments())
        yield tuple(with_nan(spoilt).arguments())
    for token in (-1, -(2**40), skinny_oracle.VOCAB, 2**40):
        inputs = skinny_oracle.make_inputs("embed", 2, 18, 50)
        inputs.token_ids[1] = token
        yield tuple(inputs.arguments())


@op("attn_backends::streamed_linear", close=SUMS, strided="x")
def streamed_linear():
    for form in streamed_oracle.FORMS:
        for inputs in (50, 9):
            yield tuple(streamed_oracle.make_arguments(form, 7, 21, inputs))
        yield tuple(with_nan(streamed_oracle.make_arguments(form, 3, 37, 56)))
        narrow = streamed_oracle.in_8_bits(streamed_oracle.make_arguments(form, 5, 37, 50, torch.bfloat16))
        spoilt = with_nan(narrow._replace(x=narrow.x.clone()))
        for arguments, round_x in product((narrow, spoilt), (False, True)):
            yield tuple(arguments._replace(round_x=round_x))


@op("attn_backends::linear", close=SUMS, strided="x")
def linear():
    for rows, outputs, dtype in each((1, 5, 200), (21, 64), (torch.float16, torch.bfloat16)):
        weight = noise(outputs, 72, seed=1, dtype=dtype)
        for parts in ((weight, None), operands(Fp8Weight.of(weight))):
            for bias in (None, noise(outputs, seed=2, dtype=dtype)):
                yield noise(rows, 72, dtype=dtype), *parts, bias
    yield noise(72, 5).half().T, *operands(Fp8Weight.of(noise(21, 72))), None


# The logits of more than 64 rows are rounded.
@op("attn_backends::top_tokens", close={torch.float32: {"rtol": 2**-8, "atol": 1e-3}}, strided="x")
def top_tokens():
    for rows, tokens, inputs, dtype in each((1, 5, 33, 70), (200, 64, 7), (72, 256), (torch.float16, torch.bfloat16)):
        weight = noise(tokens + 9, inputs, seed=1, dtype=dtype)
        # The padding would win.
        weight[tokens:] = 100
        for parts in ((weight, None), operands(Fp8Weight.of(weight))):
            yield noise(rows, inputs, dtype=dtype), *parts, tokens
    tie, nothing = torch.ones(300, 16).half(), torch.full((300, 16), -torch.inf).half()
    one, nan = torch.ones(2, 16).half(), torch.ones(2, 16).half()
    nan[1] = torch.nan
    yield from ((one, tie, None, 290), (one, nothing, None, 290), (nan, tie, None, 290))
    yield noise(16, 5).half().T, noise(300, 16).half(), None, 290


@op("attn_backends::streamed_shares", close=SUMS)
def streamed_shares():
    for rows in (3, 5):
        product = streamed_oracle.make_arguments("plain", rows, 21, 600, torch.bfloat16)
        for operands_of in (product, streamed_oracle.in_8_bits(product)):
            yield operands_of.x, operands_of.weight, operands_of.scale, False
    wide = streamed_oracle.in_8_bits(streamed_oracle.make_arguments("plain", 5, 21, 1290, torch.bfloat16))
    yield wide.x, wide.weight, wide.scale, True


@op("attn_backends::sum_shares", close=SUMS)
def sum_shares():
    for shares, width in ((3, 5), (2, 300), (1, 21)):
        yield noise(shares, 2, width), noise(2, width, seed=1, dtype=torch.bfloat16)


# Quotients can differ in their last bit, and so tip a rounding to 8 bits.
@op("attn_backends::narrow_rows", close={**CLOSE, torch.float8_e4m3fn: {"rtol": 2**-3, "atol": 2**-9}}, strided="x")
def narrow_rows():
    for rows, width, dtype in each((3, 0, 1), (40, 1, 300), (torch.bfloat16, torch.float16)):
        yield (noise(rows, width, dtype=dtype) * torch.logspace(-3, 3, rows)[:, None].to(dtype),)
    yield (torch.zeros(2, 16).half(),)


@op("attn_backends::batch_invariant_linear", close=SUMS, strided="x weight")
def batch_invariant_linear():
    for outputs, inputs, dtype in each((40, 1), (300, 1), (torch.float32, torch.bfloat16)):
        yield noise(9, 2, inputs, dtype=dtype), noise(2, outputs, inputs, seed=1, dtype=dtype) / 8, None, None
    yield noise(2, 5, 40).transpose(0, 1), noise(2, 40, 24, seed=1).mT, None, None
    for ends in ([2, 2, 7, 9], [2, 2, 7]):
        yield noise(9, 1, 50), noise(len(ends), 20, 50, seed=1), torch.tensor(ends, dtype=torch.int32), None
    weight = noise(4, 20, 50, seed=1, dtype=torch.bfloat16) * torch.logspace(-1, 1, 20)[:, None]
    for count, ends in ((4, None), (1, torch.tensor([2, 2, 7, 9], dtype=torch.int32))):
        values, scale = operands(Fp8Weight.of(weight.bfloat16()))
        yield noise(9, count, 50, dtype=torch.bfloat16), values, ends, scale
