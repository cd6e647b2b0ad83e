"""A builder of an engine as a subject of the kit: what it is tried with, and the class that is checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from attn_backends import AttentionBackend, BrokenBackend, Capabilities, Feature, Sizes
from builders import CONTRACT_VERSION, AttentionKind, MetadataBuilder
from spec_decode.testing.subject import Subject

HEADS = Capabilities(
    devices=("cpu",),
    dtypes=(torch.bfloat16,),
    head_dims=Sizes(minimum=64, maximum=256),
    page_sizes=Sizes(minimum=16, multiple_of=16),
    features=frozenset({Feature.GQA, Feature.SLIDING_WINDOW}),
)
"""What heads of keys and values are tried with."""
LATENT = replace(
    HEADS,
    head_dims=Sizes(minimum=64, maximum=512, power_of_two=True),
    kv_dtypes=(torch.float8_e4m3fn,),
    features=frozenset({Feature.GQA, Feature.SLIDING_WINDOW, Feature.SINKS}),
    kinds=(AttentionKind.MLA,),
)
"""The same of latents."""
DENSE_LATENT = replace(
    LATENT,
    kv_dtypes=(),
    head_dims=Sizes(minimum=64, maximum=576),
    value_dims=Sizes(minimum=64, maximum=512, power_of_two=True),
    features=frozenset({Feature.GQA, Feature.VALUE_DIM}),
    required=frozenset({Feature.VALUE_DIM}),
)
"""The same of latents that are read whole, of which a value is the first part."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A builder that a kit knows. module: in the kit's room. no_attention: why nothing attends by what it builds."""

    module: str
    no_attention: str = ""


def installed_version(package: str, releases: str, what: str) -> str:
    """The engine's. releases: a pattern. Raises BrokenBackend where there is none, or one of another release."""
    try:
        found = version(package)
    except PackageNotFoundError:
        found = "none"
    if not fnmatchcase(found, releases):
        raise BrokenBackend(
            f"{what} are checked as {releases} has them, found {found}. Run `make engines`, which unpacks the right "
            f"one, or pip install '{package}=={releases}'."
        )
    return found


def subject_of(name: str, room: str, listed: Mapping[str, Listed], engine: str) -> Subject:
    """The builder of this name. room: the package of the kit. engine: with its version, such as vllm 0.33.0.

    Raises BrokenBackend for a name that is not listed.
    """
    title, _, release = engine.partition(" ")
    if name not in listed:
        raise BrokenBackend(
            f"a builder of {title} that is checked must be one of {', '.join(listed)}, got {name!r}. Fix the name."
        )
    backend = import_module(f"{room}.{listed[name].module}").backend()
    backend.version = release
    return Subject(backend(), torch.device("cpu"), engine=engine, no_attention=listed[name].no_attention)


def backend_class(
    module: str,
    builder: type[MetadataBuilder[Any]],
    capabilities: Capabilities,
    attends: type[AttentionBackend],
    **facts: Any,
) -> type[AttentionBackend]:
    """The backend that is checked: the builder, what it is tried with, and what attends by its metadata.

    module: that of the subject, beside which its known failures are. facts: further attributes of the class.
    """
    facts |= {"name": builder.__name__, "builder": builder, "capabilities": capabilities}
    # It is asked for whatever the contract says now.
    return type(builder.__name__, (attends,), {"__module__": module, "contract_version": CONTRACT_VERSION, **facts})
