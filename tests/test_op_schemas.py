"""Every op is in the table, its schema is true, and its fake matches it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from tests.ops import attention, drafting, models, sampling, state  # noqa: F401
from tests.ops.questions import check_fake, check_schema
from tests.ops.sample import TABLE

ROOT = Path(__file__).parents[1]


def test_every_defined_op_has_samples() -> None:
    rooms = ("attn_backends", "builders", "spec_decode")
    text = "".join(path.read_text() for room in rooms for path in (ROOT / room).rglob("*.py"))
    defined = set(re.findall(r'= define_op\(\s*"(\w+::\w+)"', text))
    assert len(defined) == text.count("= define_op(") and defined == set(TABLE)
    assert all(op.samples for op in TABLE.values())


@pytest.mark.parametrize("op", TABLE)
def test_schema_and_fake_match_the_op(op: str) -> None:
    of_a_kind = {tuple(map(kind_of, sample)): sample for sample in TABLE[op].samples}
    for sample in of_a_kind.values():
        check_schema(TABLE[op].call, sample)
    for sample in TABLE[op].samples:
        check_fake(TABLE[op].call, sample)


def kind_of(argument: Any) -> object:
    """What may decide on which tensors an op writes and returns, sizes aside."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.ndim, argument.is_contiguous(), argument.numel() > 0
    if isinstance(argument, list | tuple):
        return tuple(map(kind_of, argument))
    return argument if argument is None or isinstance(argument, bool | str) else type(argument)


@pytest.mark.parametrize("op", ["attn_backends::paged_attention", "attn_backends::tree_attention"])
def test_tolerance_of_rounded_probabilities_is_sharp(op: str) -> None:
    """It covers what rounding can change, and not a value scale of 1."""
    names, close = [each.name for each in TABLE[op].call._schema.arguments], TABLE[op].close[torch.bfloat16]

    def attended(sample: tuple[Any, ...], change: dict[str, Any]) -> torch.Tensor:
        arguments = tree_map_only(torch.Tensor, torch.clone, dict(zip(names, sample, strict=True)) | change)
        result = TABLE[op].call(**arguments)
        return arguments["out"] if result is None else result

    samples = [sample for sample in TABLE[op].samples if attended(sample, {}).dtype is torch.bfloat16]
    for sample in samples:
        parts = {name: part for name, part in zip(names, sample, strict=True) if name in ("value_cache", "out")}
        sizes = {name: part.float().abs().to(part.dtype) for name, part in parts.items()}
        assert attended(sample, sizes).nan_to_num().max() * 2**-8 <= close["atol"]
    scaled = [sample for sample in samples if sample[-1] is not None]
    for sample in scaled:
        wrong = attended(sample, {"value_scale": torch.ones_like(sample[-1])})
        with pytest.raises(AssertionError):
            torch.testing.assert_close(wrong, attended(sample, {}), **close, equal_nan=True)
    assert len(samples) > len(scaled) > 0
