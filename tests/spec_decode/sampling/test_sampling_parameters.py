import copy
import dataclasses
import pickle
import re

import pytest
import torch

from builders import BatchError
from spec_decode.sampling import Sampling, SamplingParams

NAN, INF = float("nan"), float("inf")
REFUSED = [
    *[("temperature", value) for value in (-1.0, 1e-4, NAN, INF, -INF, 1e39, 10**400, True, None, [1.0], 1j)],
    *[("top_k", value) for value in (-1, 2**31, 2**40, 1.5, True, None)],
    *[("top_p", value) for value in (0.0, -0.1, 1.0001, NAN, INF, True, None, ())],
    *[("seed", value) for value in (2**63, -(2**63) - 1, 0.5, None)],
    *[("min_p", value) for value in (-0.1, 1.0001, NAN, INF, True, None, ())],
    *[("logit_bias", value) for value in (3, {1: INF}, {1: NAN}, {"a": 1.0}, {1: "a"}, {1: 2e30}, [1], {True: 1.0})],
    *[("repetition_penalty", value) for value in (0.0, -1.0, 1e4, NAN, INF, True, None)],
    *[("presence_penalty", value) for value in (-2.1, 2.1, NAN, INF, True, None)],
    *[("frequency_penalty", value) for value in (-2.1, 2.1, NAN, INF, True, None)],
    *[("n", value) for value in (0, -1, 1.5, True, None, 16_385, 10**9)],
    *[("min_tokens", value) for value in (-1, 65, 2.0, True, None)],
]
ALLOWED = [
    *[("temperature", value) for value in (0, 0.0, 1e-3, 1, 100.0)],
    *[("top_k", value) for value in (0, 1, 2**31 - 1)],
    *[("top_p", value) for value in (1, 1.0, 0.5, 1e-6)],
    *[("seed", value) for value in (2**63 - 1, -(2**63))],
    *[("min_tokens", value) for value in (0, 64)],
    *[("logit_bias", value) for value in (None, {}, {3: -1e30, 0: 1})],
    *[("repetition_penalty", value) for value in (1e-3, 1, 1e3)],
    *[(f"{name}_penalty", value) for name in ("presence", "frequency") for value in (-2, 0, 2.0)],
    *[("min_p", value) for value in (0, 0.0, 1, 1e-300)],
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_value_out_of_range_is_rejected_by_name(name, value):
    with pytest.raises(BatchError, match=f"^{name} must be .* got {re.escape(str(value))}[;.]"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), ALLOWED)
def test_value_at_edge_of_range_is_accepted(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("best_of", "does not support 'best_of'. Pass n, and choose among the completions."),
        ("do_sample", "does not support 'do_sample'. Pass temperature: 0 is greedy."),
        ("max_new_tokens", "does not support 'max_new_tokens'. Did you mean max_tokens? Parameters are temperature,"),
        ("bad_words", "does not support 'bad_words'. Parameters are temperature, top_k,"),
    ],
)
def test_unknown_parameter_error_suggests_alternative(name, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        SamplingParams(**{"temperature": 0.5, name: 2})


def test_several_greedy_completions_are_rejected():
    with pytest.raises(BatchError, match=r"n must be 1 at temperature 0.*got 2\. Pass a temperature, or 1"):
        SamplingParams(n=2)


def test_every_completion_has_its_own_seed():
    each = [SamplingParams(temperature=1.0, seed=seed, n=n).each() for seed in range(-20, 20) for n in (1, 50)]
    seeds = [params.seed for many in each[1::2] for params in many]
    assert len(set(seeds)) == len(seeds) == 2000
    assert [many[0].seed for many in each] == [seed for seed in range(-20, 20) for _ in range(2)]
    assert {(params.n, params.temperature) for many in each for params in many} == {(1, 1.0)}


def test_parameters_are_copied_and_pickled_whole():
    params = SamplingParams(temperature=0.5, seed=3, stop=["x"])
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == dataclasses.replace(params) == params


def rows(sampling):
    fields = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seeds)
    return list(zip(*(field.tolist() for field in fields), strict=True))


GREEDY = (0.0, 0, 1.0, 0)


def test_every_request_has_a_row_with_kernel_dtypes():
    params = [SamplingParams(temperature=0.5, top_k=7, top_p=0.75, seed=-(2**63)), SamplingParams(seed=9)]
    sampling = Sampling.of([*params, SamplingParams(), SamplingParams(top_k=3, top_p=0.5)], "cpu")
    assert rows(sampling) == [(0.5, 7, 0.75, -(2**63)), (0.0, 0, 1.0, 9), GREEDY, GREEDY]
    assert (sampling.temperature.dtype, sampling.top_p.dtype) == (torch.float32, torch.float32)
    assert (sampling.top_k.dtype, sampling.seeds.dtype) == (torch.int32, torch.int64)


def test_loading_replaces_every_row_in_place():
    sampling = Sampling.of([SamplingParams(temperature=1.0, top_k=2, top_p=0.5, seed=3)] * 3, "cpu")
    addresses = [field.data_ptr() for field in (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seeds)]
    sampling.load([SamplingParams(temperature=2.0, seed=4)])
    assert rows(sampling) == [(2.0, 0, 1.0, 4), GREEDY, GREEDY]
    assert addresses == [f.data_ptr() for f in (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seeds)]


def test_more_requests_than_rows_are_rejected():
    sampling = Sampling.allocate(1, "cpu")
    with pytest.raises(BatchError, match="got 2 SamplingParams for 1 rows"):
        sampling.load([SamplingParams(seed=5)] * 2)
    assert rows(sampling) == [GREEDY]


def test_head_and_tail_share_rows_of_sampling():
    sampling = Sampling.of([SamplingParams(temperature=1.0, top_k=2, top_p=0.5, seed=row) for row in range(4)], "cpu")
    sampling.tail(2).load([SamplingParams(temperature=2.0, seed=7)])
    assert rows(sampling) == [(1.0, 2, 0.5, 0), (1.0, 2, 0.5, 1), (2.0, 0, 1.0, 7), GREEDY]
    sampling.head(1).load([SamplingParams(seed=8)])
    assert rows(sampling.head(2)) == rows(sampling)[:2] == [(0.0, 0, 1.0, 8), (1.0, 2, 0.5, 1)]
