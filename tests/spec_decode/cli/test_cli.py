import json
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from attn_backends import registry
from attn_backends.torch_reference import TorchReference
from builders import ReferenceBuilder

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")


@pytest.mark.parametrize("verb", ["list", "check", "draft", "matrix", "bench", "demo"])
def test_every_verb_has_help(verb, run):
    result = run(verb, "--help")
    assert result.exit_code == 0 and "--device" in result.output


@NO_CUDA
def test_an_absent_cuda_device_is_refused(checks, refused):
    assert "0 CUDA devices" in refused("check", "torch_reference", "--device", "cuda")


def test_misspelt_option_suggests_likeliest_one(run):
    result = run("draft", "x", "--max-token", "3")
    assert result.exit_code == 2 and "--max-tokens" in result.stderr
    assert not any(other in result.stderr for other in ("--max-model-len", "--backend"))


def test_list_shows_claims_as_text_and_json(run):
    shown, found = run("list", "--device", "cpu"), run("list", "--device", "cpu", "--json")
    assert shown.exit_code == 0 and "accepted" in shown.output and "IN_GRAPH: visible ranges" in shown.output
    entries, states = (json.loads(found.output)[kind] for kind in ("backends", "state_backends"))
    assert [entry["name"] for entry in entries] == registry.names()
    assert entries[0]["advance"]["level"] == "IN_GRAPH"
    assert [entry["name"] for entry in states] == registry.state_names() and "gated_delta, kda" in shown.output
    assert states[-1]["accepted"] and states[-1]["journals"] == "at least 1"


@NO_CUDA
def test_list_gives_the_reasons_of_a_rejection(run):
    assert "this machine has none" in run("list", "--device", "cuda").output


class OnlyFp32(TorchReference):
    capabilities = replace(TorchReference.capabilities, dtypes=(torch.float32,), mixed_kv_dtypes=False)


@pytest.mark.parametrize(
    ("options", "accepted"), [((), False), (("--dtype", "float32"), True), (("--spec", "dtype=float32"), True)]
)
def test_list_uses_given_dtype(options, accepted, plug_in, run):
    plug_in("only_fp32", OnlyFp32)
    found = json.loads(run("list", "--device", "cpu", "--json", *options).output)
    (entry,) = [entry for entry in found["backends"] if entry["name"] == "only_fp32"]
    assert entry["accepted"] is accepted


def test_list_uses_given_spec(run):
    options = ("head_dim=96", "sinks=true", "sliding_window=12", "soft_cap=2.5", "kind=mha", "kv_dtype=float8_e4m3fn")
    found = run("list", "--device", "cpu", *(part for option in options for part in ("--spec", option)))
    first = found.output.splitlines()[0]
    assert "32/8 heads, dim 96, page 16, bfloat16, kv float8_e4m3fn, window 12, soft cap 2.5, sinks on cpu" in first


@pytest.mark.parametrize("wrong", ["head_dim", "head_dim=wide", "heads=4", "sinks=1", "kind=gqa", "dtype=fp32", ""])
def test_list_refuses_an_invalid_spec(wrong, refused):
    assert f"got {wrong!r}. " in refused("list", "--spec", wrong)


def test_list_rejects_empty_dtype(refused):
    assert "dtype cannot be ''" in refused("list", "--dtype", "")


def test_list_names_spec_fields_for_unknown_one(refused):
    text = refused("list", "--spec", "head_dims=64")
    assert "its fields are num_q_heads, num_kv_heads, head_dim, " in text and text.endswith("Did you mean head_dim?")


def fail(*args):
    raise KeyError("no table")


def odd(**attributes):
    return type("Odd", (TorchReference,), attributes)


ODD = {
    "not loaded": (lambda: import_module("no_such_module"), "no_such_module"),
    "supports": (odd(supports=fail), "because       backend 'odd' failed in supports(): KeyError: 'no table'"),
    "no answer": (odd(supports=lambda *args: None), "must return Accepted or Rejected from supports(), got None"),
    "advance_support": (
        odd(builder=type("Silent", (ReferenceBuilder,), {"advance_support": classmethod(fail)})),
        "claims        cannot be read: KeyError: 'no table'",
    ),
    "graph_support": (
        odd(builder=type("Void", (ReferenceBuilder,), {"graph_support": None})),
        "claims        cannot be read: AttributeError: 'NoneType' object has no attribute 'name'",
    ),
}


@pytest.mark.parametrize(("make", "line"), ODD.values(), ids=ODD)
def test_list_names_failing_backend_and_continues(make, line, plug_in, run):
    plug_in("odd", make)
    plug_in("behind", TorchReference)
    result = run("list", "--device", "cpu")
    assert result.exit_code == 0 and line in result.output and "\nbehind" in result.output
    entries = json.loads(run("list", "--device", "cpu", "--json").stdout)["backends"]
    assert [entry["accepted"] for entry in entries if entry["name"] == "behind"] == [True]


def clear(*args):
    raise RuntimeError("\x1b[2J")


@pytest.mark.parametrize("verb", ["list", "doctor"])
def test_backend_text_is_printed_without_control_characters(verb, plug_in, run):
    plug_in("clears", odd(name="clears", supports=clear))
    found = run(verb, "--device", "cpu").output
    assert "\\x1b[2J" in found and "\x1b" not in found


def test_load_error_is_printed_without_control_characters(plug_in, run):
    plug_in("clears", clear)
    words = ("check", "clears", "torch_reference", "--device", "cpu", "--only", "contract.version_matches")
    found = run(*words, "--no-isolate")
    assert "\\x1b[2J" in found.output and "\x1b" not in found.output
