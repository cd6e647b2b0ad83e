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
    Rejected,
    UnknownBackend,
    explain,
    get,
    names,
    register,
    registry,
    unregister,
)
from attn_backends.torch_reference import TorchReference
from attn_backends.triton_paged import TritonPaged
from builders import CONTRACT_VERSION
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


def test_the_built_in_backends_are_known():
    assert {"torch_reference", "triton_paged"} <= {*names()}


def test_a_backend_is_made_once():
    assert get("torch_reference") is get("torch_reference")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        UnknownBackend, match=r"one of flash_attn3, .*triton_paged, got 'torch_referense'.*mean torch_re"
    ):
        get("torch_referense")


def test_an_unknown_name_is_unknown_to_explain_too():
    with pytest.raises(UnknownBackend):
        explain("nobody", make_spec(), CPU)


def test_a_registered_backend_is_had_by_its_name():
    register(Other)
    assert isinstance(get("other"), Other) and "other" in names()


def test_register_decorates():
    assert register(Other) is Other and register(replace=True)(Other) is Other


@pytest.mark.parametrize("what", ["other", TorchReference(), dict, lambda: Other(), None.__class__])
def test_what_is_no_class_of_a_backend_is_refused(what):
    before = names()
    for decorate in (register, register(replace=True)):
        with pytest.raises(BackendError, match=r"@register must decorate a class of AttentionBackend, got"):
            decorate(what)
    assert names() == before


def test_a_class_without_a_name_is_refused():
    with pytest.raises(BackendError, match=r"got '', the name of .*Nameless"):

        @register
        class Nameless(AttentionBackend):
            pass


@pytest.mark.parametrize("name", ["torch_reference", "other"])
def test_a_duplicate_is_refused_and_nothing_changes(name):
    register(Other)
    before = get(name), names()
    with pytest.raises(DuplicateBackend, match=f"'{name}' is already registered; pass replace=True"):
        register_as(name, TritonPaged)
    assert (get(name), names()) == before


def test_a_name_that_a_package_declares_is_taken_too(declare):
    declare(declared="a_plug_in:Other")
    with pytest.raises(DuplicateBackend):
        register_as("declared", TritonPaged)


def test_a_name_is_taken_over_when_asked_to():
    get("torch_reference")
    register_as("torch_reference", Other, replace=True)
    assert isinstance(get("torch_reference"), Other)


def test_unregistering_gives_a_built_in_name_back():
    register_as("torch_reference", Other, replace=True)
    get("torch_reference")
    unregister("torch_reference")
    assert type(get("torch_reference")) is TorchReference


def test_unregistering_forgets_a_backend():
    register(Other)
    get("other")
    unregister("other")
    with pytest.raises(UnknownBackend):
        get("other")


def test_a_missing_package_names_the_extra_that_brings_it():
    registry._registered["gone"] = registry._Registration("a_package_that_is_not_here:Backend", "gone-kernels")
    with pytest.raises(BrokenBackend, match=r"a_package_that_is_not_here.*pip install '\.\[gone-kernels\]'"):
        get("gone")


def test_a_missing_attribute_is_a_broken_backend(declare, plug_in_module):
    declare(gone="a_plug_in:Missing")
    with pytest.raises(BrokenBackend, match=r"does not load: AttributeError.*Missing"):
        get("gone")


def test_a_factory_that_fails_is_a_broken_backend_in_its_own_words():
    def fail():
        raise OSError("no libcuda")

    register_as("failing", fail)
    with pytest.raises(BrokenBackend, match="does not load: OSError: no libcuda"):
        get("failing")


def test_a_factory_of_something_else_is_a_broken_backend():
    register_as("wrong", dict)
    with pytest.raises(BrokenBackend, match=r"must be an attn_backends\.AttentionBackend, its factory made a dict"):
        get("wrong")


def test_another_contract_major_is_refused_with_both_numbers():
    class Old(TorchReference):
        contract_version = (CONTRACT_VERSION[0] + 1, 0)

    register_as("old", Old)
    with pytest.raises(BrokenBackend) as refused:
        get("old")
    assert str(Old.contract_version) in str(refused.value) and str(CONTRACT_VERSION) in str(refused.value)


def test_another_contract_minor_is_taken():
    class Newer(TorchReference):
        contract_version = (CONTRACT_VERSION[0], CONTRACT_VERSION[1] + 7)

    register_as("newer", Newer)
    assert isinstance(get("newer"), Newer)


def test_a_declared_backend_is_found(declare, plug_in_module):
    declare(declared="a_plug_in:Other")
    assert "declared" in names() and isinstance(get("declared"), Other)


def test_an_unknown_name_lists_declared_ones_too(declare):
    declare(declared="a_plug_in:Other")
    with pytest.raises(UnknownBackend, match=r"one of declared, flash_attn3, .*torch_reference"):
        get("nobody")


def test_a_registered_name_wins_over_a_declared_one(declare, plug_in_module):
    declare(declared="a_plug_in:Other")
    register_as("declared", TritonPaged, replace=True)
    assert isinstance(get("declared"), TritonPaged) and names().count("declared") == 1


def test_a_broken_plug_in_is_rejected_with_its_reason(declare):
    declare(declared="a_package_that_is_not_here:Backend")
    verdict = explain("declared", make_spec(), CPU)
    assert isinstance(verdict, Rejected) and "a_package_that_is_not_here" in verdict.reasons[0]


def test_a_broken_plug_in_breaks_nobody_else(declare):
    declare(declared="a_package_that_is_not_here:Backend")
    assert isinstance(explain("torch_reference", make_spec(), CPU), Accepted)


def test_a_backend_that_failed_is_tried_again():
    results = iter([RuntimeError("not yet"), Other()])

    def factory():
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return result

    register_as("late", factory)
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


def test_a_plug_in_is_named_as_it_is_had(declare):
    declare(declared="a_plug_in:Other", torch_reference="a_plug_in:Other")
    found = [(plug_in.name, plug_in.package) for plug_in in registry.plug_ins()]
    assert found == [("declared", "unknown"), ("unknown:torch_reference", "unknown")]
    assert {name for name, _ in found} <= {*names()}


def test_what_a_call_has_registered_is_known_here_alone(declare):
    declare(declared="a_plug_in:Other")
    register(Other)
    register_as("triton_paged", Other, replace=True)
    asked = ("torch_reference", "declared", "other", "triton_paged")
    assert [registry.registered_here(name) for name in asked] == [False, False, True, True]


def test_a_refused_plug_in_is_not_loaded_and_keeps_its_name(declare):
    declare(declared="a_package_that_is_not_here:Backend")
    registry.refuse("declared", "it ended a process")
    with pytest.raises(BrokenBackend, match=r"^it ended a process$"):
        get("declared")
    assert "declared" in names()


@pytest.mark.parametrize("answer", [None, True, "yes"])
def test_an_answer_that_is_none_is_a_rejection_that_says_so(answer):
    register_as("odd", type("Odd", (TorchReference,), {"supports": lambda *asked: answer}))
    verdict = explain("odd", make_spec(), CPU)
    assert isinstance(verdict, Rejected) and f"supports() gave {answer!r}" in verdict.reasons[0]


def test_a_backend_that_leaves_python_when_asked_is_rejected_in_words():
    register_as("odd", type("Odd", (TorchReference,), {"supports": lambda *asked: sys.exit("licence expired")}))
    assert "SystemExit: licence expired" in str(explain("odd", make_spec(), CPU))


def test_a_backend_whose_record_raises_is_refused_with_what_it_raised():
    def no_record(self):
        raise KeyError("no table")

    register_as("odd", type("Odd", (TorchReference,), {"capabilities": property(no_record)}))
    with pytest.raises(BrokenBackend, match=r"must state capabilities, .*got KeyError\('no table'\)"):
        get("odd")


def test_a_backend_whose_record_cannot_be_made_is_broken_in_the_records_words():
    def with_a_wrong_record():
        return type("Odd", (TorchReference,), {"capabilities": replace(TorchReference.capabilities, devices="cpu")})()

    register_as("odd", with_a_wrong_record)
    with pytest.raises(BrokenBackend, match=r"CapabilitiesError: devices must be .*, got 'cpu'"):
        get("odd")


@pytest.mark.parametrize(
    ("write", "method"), [("ROPE", "rope_and_write_kv"), ("KV_A_NORM_ROPE", "norm_rope_and_write_latent")]
)
def test_a_fused_write_without_its_method_is_refused_at_load(write, method):
    class Promises(TorchReference):
        capabilities = replace(TorchReference.capabilities, fused_writes=frozenset({FusedWrite[write]}))

    setattr(Promises, method, None)
    register_as("promises", Promises)
    with pytest.raises(BrokenBackend, match=rf"it lacks {method}; a layer would fail.*leave the write out"):
        get("promises")


@pytest.mark.parametrize(
    "name", ["", " ", "a b", "a\nb", "\x1b[31mred", "a/b", "a|b", "_a", "-a", "a:b", "\u017fa", 3, None]
)
def test_a_name_that_no_file_or_table_can_show_is_refused(name):
    before = names()
    with pytest.raises(BackendError, match=r"must be made of ASCII letters.*Choose another"):
        register_as(name, Other)
    assert names() == before


@pytest.mark.parametrize("name", ["all", "available"])
def test_a_word_of_the_command_line_is_no_name(name):
    with pytest.raises(BackendError, match="stands for several"):
        register_as(name, Other)


@pytest.mark.parametrize("replace_it", [True, False])
def test_names_that_differ_by_case_alone_are_refused(replace_it):
    with pytest.raises(DuplicateBackend, match=r"'Torch_Reference' is 'torch_reference' but for that"):
        register_as("Torch_Reference", Other, replace=replace_it)
    assert "Torch_Reference" not in names()


@pytest.mark.parametrize("name", ["", " ", "a\nb", "\x1b[31mred", "a/b", "a|b", "all"])
def test_a_declared_name_that_is_none_is_listed_harmlessly_and_not_loaded(declare, plug_in_module, name):
    declare(**{name: "a_plug_in:Other"})
    (listed,) = {*names()} - {*registry._BUILT_IN}
    assert listed.startswith("unknown:") and listed.isprintable() and not {*listed} & {*" /|"}
    with pytest.raises(BrokenBackend, match=r"a backend name must .* from package unknown. Rename its entry point"):
        get(listed)


def test_declared_names_that_differ_by_case_alone_mean_none_of_them(declare, plug_in_module):
    declare(fast="a_plug_in:Other", Fast="a_plug_in:Other", TRITON_PAGED="a_plug_in:Other")
    for name in ("fast", "Fast"):
        with pytest.raises(BrokenBackend, match=r"all declare 'fast' and 'Fast'.*Ask for unknown:fast or unknown:Fast"):
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
def test_a_setting_of_torch_that_loading_changes_is_put_back_and_told(what, change, read, fails):
    def factory():
        change()
        if fails:
            raise OSError("no libcuda")
        return Other()

    register_as("rude", factory)
    before = read()
    with pytest.warns(RuntimeWarning, match=f"backend 'rude', while it was loaded, has set torch's {what} to"):
        if fails:
            with pytest.raises(BrokenBackend):
                get("rude")
        else:
            get("rude")
    assert read() == before


def test_numbers_that_loading_draws_are_not_missed():
    register_as("draws", lambda: torch.rand(3) is not None and Other())
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    get("draws")
    assert torch.equal(torch.rand(4), expected)


class Abrupt(BaseException):
    """What no `except Exception` catches."""


def test_a_backend_that_raises_what_is_no_exception_costs_no_other_its_answer():
    def raise_it(*_):
        raise Abrupt("enough")

    register_as("abrupt", raise_it)
    assert "does not load: Abrupt: enough" in str(explain("abrupt", make_spec(), CPU))
    register_as("asked", type("Asked", (TorchReference,), {"supports": raise_it}))
    assert "was asked and failed: Abrupt: enough" in str(explain("asked", make_spec(), CPU))
    register_as("stated", type("Stated", (TorchReference,), {"capabilities": property(raise_it)}))
    assert "must state capabilities" in str(explain("stated", make_spec(), CPU))
