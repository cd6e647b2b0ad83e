"""Reports of schema attn-report/1, which had neither tags nor claims.

The names of their cases say what a case changed in the backend's plainest spec, so that is what a converted result is
tagged with, and no more: which dtype or page size the plainest spec had is not known. Claims stay empty. To have both,
run the checks again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

SCHEMA_1 = "attn-report/1"

_BATCHES = {
    "decode": ("mode:decode",),
    "single": ("mode:decode",),
    "verify": ("mode:verify",),
    "ragged": ("mode:prefill", "mode:extend", "mode:decode"),
}
_WORDS = {
    "window": "feature:sliding_window",
    "sinks": "feature:sinks",
    "cap": "feature:soft_cap",
    "gqa": "feature:gqa",
    "mqa": "feature:gqa",
    "mla": "feature:mla",
    "fp16": "dtype:float16",
    "bf16": "dtype:bfloat16",
    "fp32": "dtype:float32",
}
_DEEPSEEK = {
    "deepseek_v3": ("feature:mla", "feature:value_dim", "dtype:bfloat16", "dim:576", "page:64"),
    "deepseek_v4": ("feature:mla", "feature:sliding_window", "feature:sinks", "dtype:bfloat16", "dim:512"),
}
_NAMED = {
    "value_dim": ("feature:value_dim", "dim:96"),
    "dims_192_and_128": ("feature:value_dim", "dim:192"),
    "dims_64_and_256": ("feature:value_dim", "dim:64"),
    "dims_256_and_64": ("feature:mla", "feature:value_dim", "dim:320"),
    "bf16_over_fp32_cache": ("dtype:bfloat16", "kv:mixed"),
    "fp8_cache": ("dtype:bfloat16", "kv:float8_e4m3fn"),
    "fp8_cache_window": ("dtype:bfloat16", "kv:float8_e4m3fn", "feature:sliding_window"),
}
_ADVANCE = ("builder.advance_", "builder.plans_ahead_", "builder.padding_", "builder.limits_", "builder.step_fields_")


def from_version_1(document: dict[str, Any]) -> dict[str, Any]:
    """The document in schema attn-report/2; what is wrong with it stays for the validation to find."""
    results = document.get("results")
    converted = [_tagged(result) for result in results] if isinstance(results, list) else results
    return {**document, "schema": "attn-report/2", "converted_from": SCHEMA_1, "results": converted}


def _tagged(result: Any) -> Any:
    if not isinstance(result, dict):
        return result
    check, case = str(result.get("check", "")), str(result.get("case", ""))
    return {**result, "tags": list(dict.fromkeys(_tags(check, case)))}


def _tags(check: str, case: str) -> Iterator[str]:
    family = check.split(".")[0]
    if check == "contract.loads":
        yield "*"
    elif family in ("contract", "refusal"):
        yield {"contract": "contract:declared", "refusal": "contract:refusals"}[family]
    elif family == "drafter":
        # The kit of that schema compared both graph strategies with eager drafting, and said only how often.
        if check == "drafter.strategies_agree":
            yield from ("strategy:full_loop", "strategy:per_step", "strategy:eager")
    else:
        if family == "poison":
            yield "contract:memory"
        if family == "graph":
            yield "graph:capture"
        if check.startswith((*_ADVANCE, "graph.")):
            yield "graph:advance"
        if check == "numerics.extra_lists_join_the_softmax":
            yield "feature:sparse"
        yield from _of_case(case)


def _of_case(case: str) -> Iterator[str]:
    variant, _, batch = case.rpartition("-")
    yield from _BATCHES.get(batch, ())
    bare = variant.removeprefix("mla_")
    if bare in _NAMED:
        yield from _NAMED[bare]
    elif size := re.fullmatch(r"(page|dim|dims)_(\d+)", bare):
        yield f"{size[1].removesuffix('s')}:{size[2]}"
    elif family := re.match(r"deepseek_v[34]", bare):
        yield from _DEEPSEEK[family[0]]
        if "packed" in bare:
            yield "kv:float8_e4m3fn"
        if family[0] == "deepseek_v4":
            yield "page:1" if bare.endswith("page_1") else "page:64"
    else:
        yield from (_WORDS[word] for word in bare.split("_") if word in _WORDS)
    if variant != bare:
        yield "feature:mla"
