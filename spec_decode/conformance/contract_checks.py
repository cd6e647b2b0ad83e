"""Family contract: the shape of the claims."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import msgspec
import torch

from attn_backends import Accepted, AttentionBackend, Rejected, StateBackend, registry
from builders import CONTRACT_VERSION, AdvanceLevel, AdvanceSupport, HostLengths, MetadataBuilder
from spec_decode.conformance.cases import spec_cases
from spec_decode.conformance.check import BOTH, AnySubject, Family
from spec_decode.conformance.coverage import DECLARED, only
from spec_decode.testing.batches import DECODE, Case
from spec_decode.testing.built_batch import BuiltBatch
from spec_decode.testing.metadata_fields import tensors_of
from spec_decode.testing.outcome import CheckFailure, Measurements, Unsupported, expect
from spec_decode.testing.paged_fixture import PagedFixture
from spec_decode.testing.subject import Subject

check = Family("contract", covers=only(DECLARED))

_IS_DATA = "the capability record survives a round trip through JSON"
_BASE = spec_cases({"decode": DECODE}, ("base",))


@check("a backend states the contract version it was built for", of=BOTH)
def version_matches(subject: AnySubject, case: None) -> None:
    expect(
        subject.backend.contract_version[0] == CONTRACT_VERSION[0],
        contract="contract_version has this library's major number",
        expected=str(CONTRACT_VERSION),
        got=subject.backend.contract_version,
    )
    stated = [owner for owner in type(subject.backend).__mro__ if "contract_version" in vars(owner)]
    expect(
        stated[0] not in (AttentionBackend, StateBackend),
        contract=f"a backend's own class states contract_version; {stated[0].__name__}'s moves with this library, so "
        "newer checks would fail the backend",
        expected=f"contract_version = {CONTRACT_VERSION} in {type(subject.backend).__name__}",
        got=f"{stated[0].__name__}'s own",
    )


@check("a backend is registered under its own name", since=(1, 1), of=BOTH)
def name_is_the_registered_one(subject: AnySubject, case: None) -> None:
    # If several packages declare a name, each is available as "package:name".
    registered = subject.requested_name.rpartition(":")[2] or subject.backend.name
    expect(
        subject.backend.name == registered,
        contract="plans, errors and reports show the class's name, so it must be the registered one",
        expected=f"name = {registered!r} in {type(subject.backend).__name__}, as it is registered",
        got=repr(subject.backend.name),
    )


@check("capabilities can be stored in a report", of=BOTH)
def capabilities_are_data(subject: AnySubject, case: None) -> Measurements:
    able = subject.backend.capabilities
    try:
        text = _as_json(able)
        same = _as_json(msgspec.json.decode(text, type=type(able), dec_hook=_dtype_of)) == text
    except (TypeError, ValueError) as error:
        raise CheckFailure(contract=_IS_DATA, expected="a record that JSON can hold", got=str(error)) from error
    fields = [field.name for field in dataclasses.fields(able)]
    expect(same, contract=_IS_DATA, expected=f"the fields of {type(able).__name__}", got=fields)
    return {"bytes": float(len(text))}


def _as_json(able: object) -> bytes:
    return msgspec.json.encode(able, enc_hook=_name_of, order="deterministic")


def _name_of(value: object) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    raise TypeError(f"a {type(value).__name__} is not plain data")


def _dtype_of(kind: type, name: str) -> object:
    return getattr(torch, name)


@check("supports() returns Accepted, or Rejected with reasons; never a bool", of=BOTH)
def supports_answers_with_reasons(subject: AnySubject, case: None) -> None:
    backend: Any = subject.backend
    spec = subject.base_spec()
    answer = backend.supports(spec, subject.device)
    expect(isinstance(answer, Accepted), contract="supports()", expected="Accepted", got=answer)
    answer = backend.supports(spec, torch.device("meta"))
    expect(
        isinstance(answer, Rejected) and all(answer.reasons),
        contract="supports() rejects a device it cannot run on, with reasons",
        expected="Rejected(reasons)",
        got=answer,
    )


@check("a builder declares graph and advance support, and its step fields", _BASE)
def builder_declares_itself(subject: Subject, case: Case) -> None:
    builder = subject.backend.builder
    support = builder.advance_support(case.spec, subject.device)
    expect(
        isinstance(support, AdvanceSupport) and len(support.reason) > 0,
        contract="advance_support returns a level with its reason",
        expected="AdvanceSupport(level, reason)",
        got=support,
    )
    expect(
        support.level is not AdvanceLevel.PREPLANNED or builder.host_lengths is not HostLengths.NONE,
        contract="a builder that plans ahead needs host lengths",
        expected="host_lengths UPPER_BOUND or EXACT",
        got=builder.host_lengths,
    )
    metadata = BuiltBatch.of(subject, case).metadata
    missing = set(builder.step_fields) - {field.name for field in dataclasses.fields(metadata)}
    expect(not missing, contract="step_fields name metadata fields", expected="no others", got=missing)


@check("metadata is a frozen dataclass: its tensors change, its fields do not", _BASE)
def metadata_is_frozen(subject: Subject, case: Case) -> None:
    metadata = BuiltBatch.of(subject, case).metadata
    params = getattr(metadata, "__dataclass_params__", None)
    expect(
        params is not None and params.frozen,
        contract="metadata is a frozen dataclass",
        expected="@dataclass(frozen=True)",
        got=type(metadata).__name__,
    )


@check("two builders can be used side by side", _BASE)
def builders_share_no_state(subject: Subject, case: Case) -> None:
    fixture = PagedFixture(subject, case.spec, case.batch.rows)
    view = fixture.view(fixture.load(case.batch), case.batch)
    shared = {t.untyped_storage().data_ptr() for t in tensors_of(view).values()}
    first, second = (tensors_of(fixture.builder().build(view)) for _ in range(2))
    own = {n for n, t in first.items() if t.numel() and t.untyped_storage().data_ptr() not in shared}
    aliased = {n for n in own if first[n].untyped_storage().data_ptr() == second[n].untyped_storage().data_ptr()}
    expect(
        not aliased,
        contract="builders share no persistent buffer",
        expected="own storage for each",
        got=f"shared fields {sorted(aliased)}",
    )


@check("a subclass that overrides build() must declare its advance again")
def overriding_build_drops_the_claim(subject: Subject, case: None) -> None:
    base: type[MetadataBuilder[Any]] = subject.backend.builder
    derived = type("Derived", (base,), {"build": lambda self, batch, *, horizon=0: None})
    support = cast("type[MetadataBuilder[Any]]", derived).advance_support(subject.base_spec(), subject.device)
    expect(
        support.level is AdvanceLevel.REBUILD,
        contract="an inherited claim does not cover another build()",
        expected="REBUILD",
        got=support,
    )


@check("using a backend on the CPU never initialises CUDA", _BASE)
def cpu_use_touches_no_cuda(subject: Subject, case: Case) -> None:
    if subject.device.type != "cpu" or torch.cuda.is_initialized():
        raise Unsupported("CUDA is already initialised here, so this cannot be tested")
    BuiltBatch.of(subject, case).attend()
    expect(
        not torch.cuda.is_initialized(),
        contract="no CUDA context without a CUDA device in use",
        expected="torch.cuda not initialised by build(), write_kv() and forward()",
        got="initialised",
    )


@check("a module is imported without initialising CUDA", since=(1, 1), of=BOTH)
def loading_touches_no_cuda(subject: AnySubject, case: None) -> None:
    expect(
        not registry.started_cuda(subject.backend),
        contract="loading a backend must not initialise CUDA: no device has been chosen yet",
        expected="torch.cuda as it was; query devices in supports(), a builder or forward()",
        got="initialised while it was loaded",
    )
