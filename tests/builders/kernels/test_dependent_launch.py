"""Programmatic dependent launch: when it is chosen, and that every kernel launched so waits for its predecessor."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import torch

from builders import BatchError
from builders.kernels.triton_runtime import HAVE_TRITON, PDL_VARIABLE, dependent_launch

ROOT = Path(__file__).parents[3]
SOURCES = [path for folder in ("builders", "attn_backends", "spec_decode") for path in (ROOT / folder).rglob("*.py")]
CHOSEN = {"PDL": True, "launch_pdl": True}


@pytest.fixture
def options(monkeypatch):
    """The options on a GPU of some compute capability, with the variable set."""

    def of(capability, setting=None):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.delenv(PDL_VARIABLE, raising=False)
        if setting is not None:
            monkeypatch.setenv(PDL_VARIABLE, setting)
        dependent_launch.cache_clear()
        return dependent_launch(torch.device("cuda", 0))

    yield of
    dependent_launch.cache_clear()


@pytest.mark.skipif(not HAVE_TRITON, reason="needs triton")
@pytest.mark.parametrize(
    ("capability", "setting", "chosen"),
    [
        ((9, 0), None, True), ((10, 0), None, True), ((8, 9), None, False), ((9, 0), "1", True), ((9, 0), "0", False),
        ((8, 0), "0", False),
    ],
)  # fmt: skip
def test_pdl_is_chosen_if_gpu_has_it(options, capability, setting, chosen):
    assert options(capability, setting) == (CHOSEN if chosen else {"PDL": False})


@pytest.mark.parametrize(
    ("capability", "setting", "message"),
    [
        ((8, 0), "1", r"ATTN_BACKENDS_PDL=1 needs compute capability 9\.0.*got \(8, 0\)"),
        ((9, 0), "yes", "must be 0 or 1, got 'yes'"),
    ],
)
def test_unsupported_or_unknown_pdl_setting_is_rejected(options, capability, setting, message):
    with pytest.raises(BatchError, match=message):
        options(capability, setting)


def test_pdl_is_never_chosen_on_cpu(monkeypatch):
    monkeypatch.setenv(PDL_VARIABLE, "1")
    dependent_launch.cache_clear()
    assert dependent_launch(torch.device("cpu")) == {"PDL": False}
    dependent_launch.cache_clear()


PREFETCH = "prefetch_weight"
"""It reads no value, and may come before the wait."""


@cache
def nodes_of_sources():
    """By file with a kernel or a launch, what its syntax tree is made of."""
    texts = {path: path.read_text() for path in SOURCES}
    launching = {path: text for path, text in texts.items() if re.search(r"kernel\[|PDL|dependent_launch", text)}
    return {path: list(ast.walk(ast.parse(text))) for path, text in launching.items()}


@cache
def definitions():
    """Each function with a parameter PDL, helpers of the ground floor and a prefetch aside."""
    found = []
    for path, nodes in nodes_of_sources().items():
        for node in nodes if path.name != "triton_runtime.py" else ():
            is_kernel = isinstance(node, ast.FunctionDef) and node.name != PREFETCH
            if is_kernel and "PDL" in [argument.arg for argument in node.args.args]:
                found.append(node)
    return found


def launches():
    """Every launch of a kernel: its file, its name, and whether it passes the options."""
    for path, nodes in nodes_of_sources().items():
        assigned = [node for node in nodes if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
        its = [node.targets[0] for node in assigned if getattr(node.value.func, "id", "") == "dependent_launch"]
        options = ("dependent_launch(", *map(ast.unparse, its))
        for call in nodes:
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript):
                unpacked = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg is None]
                yield path.name, ast.unparse(call.func.value), any(o.startswith(options) for o in unpacked)


def test_every_kernel_launch_passes_pdl_options():
    every = {*launches()}
    launched = {(file, name, so) for file, name, so in every if name.endswith("kernel")}
    assert not [(file, name) for file, name, so in launched if not so]
    assert {name for _, name, _ in launched} == {node.name for node in definitions()} and len(launched) > 50
    assert not [(file, name) for file, name, so in every if so and not name.endswith("kernel")]


def statements_before_the_wait(kernel):
    """What a kernel does before it awaits its predecessor, as source; None where it does not, or not on every path."""
    body = [ast.unparse(statement) for statement in kernel.body[ast.get_docstring(kernel) is not None :]]
    return body[: body.index("await_previous(PDL)")] if "await_previous(PDL)" in body else None


MEMORY = re.compile(r"\.?(load|store|atomic_\w+|inline_asm_elementwise)\(|return")


def test_pdl_kernel_touches_no_memory_before_wait():
    before = {kernel.name: statements_before_the_wait(kernel) for kernel in definitions()}
    assert before and None not in before.values()
    assert not [(name, line) for name, lines in before.items() for line in lines if MEMORY.search(line)]


def test_only_prefetch_and_indices_precede_the_wait():
    called = {
        (kernel.name, ast.unparse(call.func))
        for kernel in definitions()
        for statement in statements_before_the_wait(kernel) or ()
        for call in ast.walk(ast.parse(statement))
        if isinstance(call, ast.Call) and not ast.unparse(call.func).startswith("tl.")
    }
    kernels = ("streamed_kernel", "streamed_tma_kernel", "top_of_tiles_kernel")
    assert called == {(name, PREFETCH) for name in kernels}
