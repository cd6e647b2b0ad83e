"""An engine's builder as a subject of the kit: the capabilities it is tested with, and the class under test."""

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
"""Test capabilities for keys and values per head."""
LATENT = replace(
    HEADS,
    head_dims=Sizes(minimum=64, maximum=512, power_of_two=True),
    kv_dtypes=(torch.float8_e4m3fn,),
    features=frozenset({Feature.GQA, Feature.SLIDING_WINDOW, Feature.SINKS}),
    kinds=(AttentionKind.MLA,),
)
"""The same for latents."""
DENSE_LATENT = replace(
    LATENT,
    kv_dtypes=(),
    head_dims=Sizes(minimum=64, maximum=576),
    value_dims=Sizes(minimum=64, maximum=512, power_of_two=True),
    features=frozenset({Feature.GQA, Feature.VALUE_DIM}),
    required=frozenset({Feature.VALUE_DIM}),
)
"""The same for latents that are read whole, with the value as the first part."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A builder that a kit knows. module: in the kit's package. no_attention: why nothing attends with its metadata.

    families: the families of checks that judge it; empty for the kit's.
    """

    module: str
    no_attention: str = ""
    families: tuple[str, ...] = ()


def state_builder(module: str) -> Listed:
    """List a builder of metadata for recurrent states."""
    return Listed(module, "a recurrence runs by its metadata, nothing attends", ("state",))


def installed_version(package: str, releases: str, what: str) -> str:
    """Return the engine's version. releases: a pattern. Raises BrokenBackend if it is missing or does not match."""
    try:
        found = version(package)
    except PackageNotFoundError:
        found = "none"
    if not fnmatchcase(found, releases):
        raise BrokenBackend(
            f"checks of {what} need {releases}, found {found}. Run `make engines`, which unpacks the right one, or pip "
            f"install '{package}=={releases}'."
        )
    return found


def subject_of(name: str, room: str, listed: Mapping[str, Listed], engine: str, families: tuple[str, ...]) -> Subject:
    """Return the builder of this name as a subject. room: the kit's package. engine: name and version, as vllm 0.33.0.
    families: the kit's.

    Raises BrokenBackend for a name that is not listed.
    """
    title, _, release = engine.partition(" ")
    if name not in listed:
        raise BrokenBackend(
            f"a {title} builder to check must be one of {', '.join(listed)}, got {name!r}. Fix the name."
        )
    backend = import_module(f"{room}.{listed[name].module}").backend()
    backend.version = release
    return Subject(
        backend(),
        torch.device("cpu"),
        engine=engine,
        no_attention=listed[name].no_attention,
        families=listed[name].families or families,
    )


def backend_class(
    module: str,
    builder: type[MetadataBuilder[Any]],
    capabilities: Capabilities,
    attends: type[AttentionBackend],
    **facts: Any,
) -> type[AttentionBackend]:
    """Make the backend under test: the builder, the capabilities it is tested with, and the class that attends.

    module: the subject's, next to which its known failures lie. facts: further attributes of the class.
    """
    facts |= {"name": builder.__name__, "builder": builder, "capabilities": capabilities}
    # It is tested against the current contract.
    return type(builder.__name__, (attends,), {"__module__": module, "contract_version": CONTRACT_VERSION, **facts})
