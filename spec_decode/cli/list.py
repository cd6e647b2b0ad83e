"""`attn-backends list`: what is registered, what it claims, and whether it runs here."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from spec_decode.cli.options import device_option, resolve_device, try_plug_ins_aloud
from spec_decode.cli.output import UserError, did_you_mean, say, stdout

if TYPE_CHECKING:
    import torch

    from attn_backends.registry import Backend
    from builders import AttentionSpec, StateSpec

_WIDTH = 12
_CLAIMS = ("kinds", "recurrences", "features", "needs", "dtypes", "kv_dtypes", "state_dtypes")
_STATE_SIZES = ("key_dims", "value_dims", "conv_widths", "journals")


@click.command("list")
@device_option
@click.option("--dtype", help="Dtype of queries and cache: float32, bfloat16 or float16; default bfloat16.")
@click.option(
    "--spec",
    "fields",
    metavar="FIELD=VALUE",
    multiple=True,
    help="A field of the AttentionSpec to check: head_dim=64, sinks=true, kind=mla; repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")
def list_backends(device: str | None, dtype: str | None, fields: tuple[str, ...], as_json: bool) -> None:
    """List every registered backend, what it claims, and whether it runs here, with reasons.

    The spec has 32 query and 8 KV heads of dim 128, pages of 16 tokens and bfloat16; --dtype and --spec change it. A
    backend of recurrent state is asked for the gated delta rule of Qwen3-Next instead. A package whose backend crashes
    or hangs is named, and the others are still listed.
    """
    from attn_backends import registry
    from spec_decode.tools.specs import GATED_DELTA

    spec = _requested_spec(dtype, fields)
    where = resolve_device(device, present=False)
    try_plug_ins_aloud()
    entries = [describe(name, spec, where) for name in registry.names()]
    states = [describe(name, GATED_DELTA, where) for name in registry.state_names()]
    if as_json:
        asked = {"spec": spec.describe(), "state_spec": GATED_DELTA.describe(), "device": str(where)}
        click.echo(json.dumps({**asked, "backends": entries, "state_backends": states}, indent=2))
    else:
        print_backends(stdout(), entries, f"{spec.describe()} on {where}")
        say(stdout(), "")
        print_backends(stdout(), states, f"{GATED_DELTA.describe()} on {where}")


def _requested_spec(dtype: str | None, changes: tuple[str, ...]) -> AttentionSpec:
    """Build the spec that `list` asks about. Raises UserError for an unknown field, or one of another type."""
    from builders import AttentionSpec
    from spec_decode.tools.specs import GQA

    given: dict[str, Any] = {
        name: getattr(GQA, name) for name in ("num_q_heads", "num_kv_heads", "head_dim", "page_size")
    }
    for change in (*changes, *([] if dtype is None else [f"dtype={dtype}"])):
        name, _, text = change.partition("=")
        if name not in (readers := _readers()):
            raise UserError(
                f"a spec has no field {name!r}, got {change!r}. Fix --spec: its fields are {', '.join(readers)}."
                f"{did_you_mean(name, list(readers))}"
            )
        try:
            given[name] = readers[name](text)
        except (KeyError, ValueError) as error:
            raise UserError(
                f"{name} cannot be {text!r}, got {change!r}. Write it as in head_dim=64, scale=0.1, sinks=true, "
                "kind=mla or dtype=float32."
            ) from error
    return AttentionSpec(**given)


def _readers() -> dict[str, Callable[[str], object]]:
    """Return parsers from text for each field of AttentionSpec. They raise KeyError or ValueError for invalid text."""
    import torch

    from builders import AttentionKind

    dtypes = {
        str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
    }
    counts = ("num_q_heads", "num_kv_heads", "head_dim", "page_size", "value_dim", "sliding_window")
    return {
        **dict.fromkeys(counts, int),
        **dict.fromkeys(("scale", "soft_cap"), float),
        **dict.fromkeys(("dtype", "kv_dtype"), dtypes.__getitem__),
        "sinks": {"true": True, "false": False}.__getitem__,
        "kind": AttentionKind,
    }


def describe(name: str, spec: AttentionSpec | StateSpec, device: torch.device) -> dict[str, Any]:
    """Describe one backend as plain data. A backend that does not load has only a name and reasons, and "missing" if a
    package is the cause; "unreadable" replaces claims that cannot be read, and says why."""
    from attn_backends import BrokenBackend, MissingPackage, Rejected, registry

    verdict = registry.explain(name, spec, device)
    entry: dict[str, Any] = {
        "name": name,
        "accepted": bool(verdict),
        "reasons": list(map(str, verdict.reasons)) if isinstance(verdict, Rejected) else [],
    }
    try:
        return {**entry, **_claims(registry.load(name), spec, device)}
    except MissingPackage as error:
        return {**entry, "missing": error.missing}
    except BrokenBackend:
        return entry
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plug-in can claim anything; it must not cost the others their lines
        return {**entry, "unreadable": f"{type(error).__name__}: {error}"}


def _claims(backend: Backend, spec: Any, device: torch.device) -> dict[str, Any]:
    from attn_backends import StateBackend

    advance = backend.builder.advance_support(spec, device)
    shared = {
        "version": str(backend.version),
        "graphs": backend.builder.graph_support.name,
        "advance": {"level": advance.level.name, "reason": str(advance.reason)},
    }
    if isinstance(backend, StateBackend):
        claims = backend.capabilities
        return {
            **shared,
            "recurrences": [each.value for each in claims.recurrences],
            "features": sorted(feature.value for feature in claims.features),
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in claims.dtypes],
            "state_dtypes": [str(dtype).removeprefix("torch.") for dtype in claims.state_dtypes],
            **{name: str(getattr(claims, name)) for name in _STATE_SIZES},
        }
    able = backend.capabilities
    return {
        **shared,
        "kinds": [kind.value for kind in able.kinds],
        "features": sorted(feature.value for feature in able.features),
        "needs": sorted(feature.value for feature in able.required),
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in able.dtypes],
        "kv_dtypes": [str(dtype).removeprefix("torch.") for dtype in (*able.dtypes, *able.kv_dtypes)],
        "page_sizes": str(able.page_sizes),
        "head_dims": str(able.head_dims),
    }


def print_backends(console: Console, entries: list[dict[str, Any]], question: str) -> None:
    """Print a block per backend, and a line for each whose package is missing; `question` is the spec asked about."""
    say(console, f"requested: {question}")
    missing = {entry["name"]: entry["missing"] for entry in entries if "missing" in entry}
    for entry in entries:
        if entry["name"] in missing:
            continue
        say(console, "")
        verdict, style = ("accepted", "green") if entry["accepted"] else ("rejected", "bold red")
        version = f" {entry['version']}" if "version" in entry else ""
        say(console, f"{entry['name']}{version}: {verdict}", style)
        for label, text in _lines(entry):
            say(console, f"  {label.replace('_', ' '):<{_WIDTH}}  {text}")
    if missing:
        say(console, "\nneeds a package", "bold")
    for name, why in missing.items():
        say(console, f"  {name:<{max(map(len, missing))}}  {why}")


def _lines(entry: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [("because", reason) for reason in entry["reasons"]]
    if "unreadable" in entry:
        lines.append(("claims", f"cannot be read: {entry['unreadable']}"))
    if "version" in entry:
        lines.append(("graphs", entry["graphs"]))
        lines.append(("advance", f"{entry['advance']['level']}: {entry['advance']['reason']}"))
        lines += [(claim, ", ".join(entry[claim]) or "none") for claim in _CLAIMS if claim in entry]
        lines += [(size, entry[size]) for size in ("page_sizes", "head_dims", *_STATE_SIZES) if size in entry]
    return lines
