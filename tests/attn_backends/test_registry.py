import re
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest
import torch

from attn_backends import (
    Accepted,
    AttentionBackend,
    BackendError,
    BrokenBackend,
    DuplicateBackend,
    FusedWrite,
    NoBackend,
    Rejected,
    UnknownBackend,
    explain,
    get,
    get_state,
    names,
    register,
    registry,
    select,
    state_names,
    unregister,
)
from attn_backends.torch_reference import TorchReference
from attn_backends.torch_state import TorchState
from attn_backends.triton_paged import TritonPaged
from builders import CONTRACT_VERSION
from spec_decode.tools.specs import GATED_DELTA
from tests.factories import CPU, make_spec, register_as


class Other(TorchReference):
    name = "other"


@pytest.fixture(autouse=True)
def registry_as_it_was(monkeypatch):
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_loaded", dict(registry._loaded))
    monkeypatch.setattr(registry, "_refused", {})


@pytest.fixture
def declare(monkeypatch):
    """Makes other packages declare backends: declare(name="module:attribute")."""

    def declare(**declared):
        points = [EntryPoint(name, value, "attn_backends") for name, value in declared.items()]
        monkeypatch.setattr(registry, "entry_points", lambda group: points if group == "attn_backends" else [])

    return declare


@pytest.fixture
def plug_in_module(monkeypatch):
    module = ModuleType("a_plug_in")
    module.Other = Other
    monkeypatch.setitem(sys.modules, "a_plug_in", module)


def test_built_in_backend_is_listed_and_cached():
    assert {"torch_reference", "triton_paged"} <= {*names()} and get("torch_reference") is get("torch_reference")


def test_unknown_name_lists_known_and_declared(declare):
    declare(declared="a_plug_in:Other")
    known = r"one of declared, flash_attn3, .*triton_paged, triton_state, got 'torch_referense'.*mean torch_re"
    with pytest.raises(UnknownBackend, match=known):
        get("torch_referense")
    with pytest.raises(UnknownBackend):
        explain("nobody", make_spec(), CPU)


def test_long_unknown_name_is_truncated():
    with pytest.raises(UnknownBackend) as refused:
        get("x" * 10_000)
    assert len(str(refused.value)) < 600


def test_registered_backend_loads_until_unregistered():
    assert register(Other) is Other and register(replace=True)(Other) is Other
    assert isinstance(get("other"), Other) and "other" in names()
    unregister("other")
    with pytest.raises(UnknownBackend):
        get("other")


@pytest.mark.parametrize("what", ["other", TorchReference(), dict, lambda: Other(), None.__class__])
def test_register_rejects_non_backend_class(what):
    before = names()
    for decorate in (register, register(replace=True)):
        with pytest.raises(BackendError, match="a subclass of AttentionBackend or StateBackend, got"):
            decorate(what)
    assert names() == before


def test_a_class_without_a_name_is_refused():
    with pytest.raises(BackendError, match=r"got '', the name of .*Nameless"):

        @register
        class Nameless(AttentionBackend):
            pass


@pytest.mark.parametrize("name", ["torch_reference", "other", "declared"])
def test_duplicate_name_is_rejected_without_change(name, declare, plug_in_module):
    declare(declared="a_plug_in:Other")
    register(Other)
    before = get(name), names()
    with pytest.raises(DuplicateBackend, match=f"'{name}' is already registered; pass replace=True"):
        register_as(name, TritonPaged)
    assert (get(name), names()) == before


def test_replaced_name_is_restored_on_unregister(declare, plug_in_module):
    declare(declared="a_plug_in:Other")
    for name, own in (("torch_reference", TorchReference), ("declared", Other)):
        assert type(get(name)) is own
        register_as(name, TritonPaged, replace=True)
        assert isinstance(get(name), TritonPaged) and names().count(name) == 1
        unregister(name)
        assert type(get(name)) is own


class Abrupt(BaseException):
    """What no `except Exception` catches."""


def raising(error):
    def fail(*_):
        raise error

    return fail


def odd(**members):
    return type("Odd", (TorchReference,), members)


def of_contract(major, minor):
    return odd(contract_version=(CONTRACT_VERSION[0] + major, CONTRACT_VERSION[1] + minor))


def with_a_wrong_record():
    return odd(capabilities=replace(TorchReference.capabilities, devices="cpu"))()


def promising(write, method):
    promised = replace(TorchReference.capabilities, fused_writes=frozenset({FusedWrite[write]}))
    return odd(capabilities=promised, **{method: None})


BROKEN = {
    "its factory fails": (raising(OSError("no libcuda")), "does not load: OSError: no libcuda"),
    "its factory raises no exception": (raising(Abrupt("enough")), "does not load: Abrupt: enough"),
    "its factory makes something else": (
        dict, "must be an attn_backends.AttentionBackend or StateBackend, its factory returned a dict",
    ),
    "another contract major": (
        of_contract(1, 0), rf"\({CONTRACT_VERSION[0] + 1}, {CONTRACT_VERSION[1]}\).*\({CONTRACT_VERSION[0]}, ",
    ),
    "its record raises": (
        odd(capabilities=property(raising(KeyError("no table")))),
        r"must state capabilities, .*got KeyError\('no table'\)",
    ),
    "its record raises no exception": (
        odd(capabilities=property(raising(Abrupt("enough")))), "must state capabilities",
    ),
    "its record cannot be made": (with_a_wrong_record, r"CapabilitiesError: devices must be .*, got 'cpu'"),
    "no method for a promised write of rope": (
        promising("ROPE", "rope_and_write_kv"),
        "it lacks rope_and_write_kv; a layer would fail.*remove the write",
    ),
    "no method for a promised write of latents": (
        promising("KV_A_NORM_ROPE", "norm_rope_and_write_latent"),
        "it lacks norm_rope_and_write_latent; a layer would fail.*remove the write",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "words"), BROKEN.values(), ids=BROKEN)
def test_broken_backend_is_explained_and_others_load(make, words):
    register_as("broken", make)
    with pytest.raises(BrokenBackend, match=words):
        get("broken")
    verdict = explain("broken", make_spec(), CPU)
    assert isinstance(verdict, Rejected) and re.search(words, str(verdict))
    assert isinstance(explain("torch_reference", make_spec(), CPU), Accepted)


def test_newer_contract_minor_is_accepted():
    newer = of_contract(0, 7)
    register_as("newer", newer)
    assert isinstance(get("newer"), newer)


ANSWERS = {
    "None": (lambda *args: None, "from supports(), got None"),
    "a bool": (lambda *args: True, "from supports(), got True"),
    "a word": (lambda *args: "yes", "from supports(), got 'yes'"),
    "an exit": (lambda *args: sys.exit("licence expired"), "SystemExit: licence expired"),
    "what is no exception": (raising(Abrupt("enough")), "failed in supports(): Abrupt: enough"),
}


@pytest.mark.parametrize(("answer", "words"), ANSWERS.values(), ids=ANSWERS)
def test_invalid_supports_answer_is_a_rejection(answer, words):
    register_as("odd", odd(supports=answer))
    verdict = explain("odd", make_spec(), CPU)
    assert isinstance(verdict, Rejected) and words in verdict.reasons[0]


def test_missing_package_error_names_extra():
    registry._registered["gone"] = registry._Registration("a_package_that_is_not_here:Backend", "gone-kernels")
    with pytest.raises(BrokenBackend, match=r"a_package_that_is_not_here.*pip install '\.\[gone-kernels\]'"):
        get("gone")


def test_declared_backend_loads_and_broken_one_is_rejected(declare, plug_in_module):
    declare(declared="a_plug_in:Other", gone="a_plug_in:Missing", absent="a_package_that_is_not_here:Backend")
    assert {"declared", "gone", "absent"} <= {*names()} and isinstance(get("declared"), Other)
    with pytest.raises(BrokenBackend, match=r"does not load: AttributeError.*Missing"):
        get("gone")
    verdict = explain("absent", make_spec(), CPU)
    assert isinstance(verdict, Rejected) and "a_package_that_is_not_here" in verdict.reasons[0]
    assert isinstance(explain("torch_reference", make_spec(), CPU), Accepted)


def test_failed_backend_load_is_retried():
    makers = iter([raising(RuntimeError("not yet")), Other])
    register_as("late", lambda: next(makers)())
    with pytest.raises(BrokenBackend):
        get("late")
    assert isinstance(get("late"), Other)


@pytest.mark.parametrize("value", ["a_mod:Other [fast]", "a_mod:Box.Other"])
def test_every_form_of_entry_point_loads(monkeypatch, value):
    module = ModuleType("a_mod")
    module.Other = TorchReference
    module.Box = type("Box", (), {"Other": TorchReference})
    monkeypatch.setitem(sys.modules, "a_mod", module)
    monkeypatch.setattr(registry, "entry_points", lambda group: [EntryPoint("d", value, "attn_backends")])
    try:
        get("d")
    finally:
        registry._loaded.pop("d", None)


def test_plug_in_name_is_its_registry_name(declare):
    declare(declared="a_plug_in:Other", torch_reference="a_plug_in:Other")
    found = [(plug_in.name, plug_in.package) for plug_in in registry.plug_ins()]
    assert found == [("declared", "unknown"), ("unknown:torch_reference", "unknown")]
    assert {name for name, _ in found} <= {*names()}


def test_registered_here_is_true_only_after_register(declare):
    declare(declared="a_plug_in:Other")
    register(Other)
    register_as("triton_paged", Other, replace=True)
    backends = ("torch_reference", "declared", "other", "triton_paged")
    assert [registry.registered_here(name) for name in backends] == [False, False, True, True]


def test_refused_plug_in_is_not_loaded_but_listed(declare):
    declare(declared="a_package_that_is_not_here:Backend")
    registry.refuse("declared", "it ended a process")
    with pytest.raises(BrokenBackend, match=r"^it ended a process$"):
        get("declared")
    assert "declared" in names()


NAMELESS = ["", " ", "a b", "a\nb", "\x1b[31mred", "a/b", "a|b", "_a", "-a", "a:b", "\u017fa", 3, None]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, r"must be made of ASCII letters.*Choose another") for name in NAMELESS),
        *((name, "means several") for name in ("all", "available")),
    ],
)
def test_invalid_or_ambiguous_name_is_rejected(name, words):
    before = names()
    with pytest.raises(BackendError, match=words):
        register_as(name, Other)
    assert names() == before


@pytest.mark.parametrize("replace_it", [True, False])
def test_names_differing_only_by_case_are_rejected(replace_it):
    with pytest.raises(DuplicateBackend, match=r"'Torch_Reference' and 'torch_reference' do not"):
        register_as("Torch_Reference", Other, replace=replace_it)
    assert "Torch_Reference" not in names()


@pytest.mark.parametrize("name", ["", " ", "a\nb", "\x1b[31mred", "a/b", "a|b", "all"])
def test_invalid_declared_name_is_listed_but_not_loaded(declare, plug_in_module, name):
    declare(**{name: "a_plug_in:Other"})
    (listed,) = {*names()} - {*registry._BUILT_IN}
    assert listed.startswith("unknown:") and listed.isprintable() and not {*listed} & {*" /|"}
    with pytest.raises(BrokenBackend, match=r"a backend name must .* from package unknown. Rename its entry point"):
        get(listed)


def test_declared_names_differing_by_case_are_ambiguous(declare, plug_in_module):
    declare(fast="a_plug_in:Other", Fast="a_plug_in:Other", TRITON_PAGED="a_plug_in:Other")
    for name in ("fast", "Fast"):
        with pytest.raises(BrokenBackend, match=r"all declare 'fast' and 'Fast'.*Use unknown:fast or unknown:Fast"):
            get(name)
    assert isinstance(get("unknown:Fast"), Other)
    with pytest.raises(BrokenBackend, match="'TRITON_PAGED', which is built in"):
        get("unknown:TRITON_PAGED")


@pytest.mark.parametrize(
    ("what", "change", "read"),
    [
        ("default dtype", lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
        ("default device", lambda: torch.set_default_device("meta"), torch.get_default_device),
        ("grad mode", lambda: torch.set_grad_enabled(not torch.is_grad_enabled()), torch.is_grad_enabled),
        ("number of threads", lambda: torch.set_num_threads(torch.get_num_threads() + 1), torch.get_num_threads),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_torch_setting_changed_on_load_is_restored(what, change, read, fails):
    def factory():
        change()
        if fails:
            raise OSError("no libcuda")
        return Other()

    register_as("rude", factory)
    before = read()
    with pytest.warns(RuntimeWarning, match=f"loading backend 'rude' set torch's {what} to"):
        if fails:
            with pytest.raises(BrokenBackend):
                get("rude")
        else:
            get("rude")
    assert read() == before


def test_loading_preserves_random_state():
    register_as("draws", lambda: torch.rand(3) is not None and Other())
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    get("draws")
    assert torch.equal(torch.rand(4), expected)


class Recurrent(TorchState):
    name = "recurrent"


def test_state_backend_is_known_by_its_own_names():
    register(Recurrent)
    try:
        assert state_names() == ["triton_state", "torch_state", "recurrent"] and not {*state_names()} & {*names()}
        assert isinstance(get_state("recurrent"), Recurrent)
        with pytest.raises(UnknownBackend, match="got 'recurrent', which keeps recurrent state"):
            get("recurrent")
        with pytest.raises(UnknownBackend, match="one of recurrent, torch_state, triton_state, got 'torch_reference'"):
            get_state("torch_reference")
    finally:
        unregister("recurrent")


@pytest.mark.parametrize(
    ("name", "spec", "words"),
    [("torch_state", make_spec(), "takes a StateSpec"), ("torch_reference", GATED_DELTA, "takes an AttentionSpec")],
)
def test_spec_of_the_other_kind_is_rejected(name, spec, words):
    assert explain(name, spec, CPU) == Rejected((words,))
    with pytest.raises(NoBackend, match=words):
        select(spec, CPU, [name])


def test_state_spec_selects_a_state_backend():
    assert select(GATED_DELTA, CPU).backend is get_state("torch_state")


def test_state_backend_with_an_attention_record_is_explained():
    register_as("broken", lambda: type("Odd", (TorchState,), {"capabilities": TorchReference.capabilities})())
    with pytest.raises(BrokenBackend, match="must state capabilities, a StateCapabilities record"):
        get_state("broken")
