"""vLLM as the adapters see it: `from ...compat import NAME` finds one of vLLM's names in the installed version.

No other file imports vLLM or knows where its names live. To support another minor, describe it in a module here, as
`v0_33` does, and add a line to VERSIONS.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pkgutil import resolve_name
from typing import Any

from attn_backends.engines.vllm.compat import v0_33

VERSIONS = {"0.33": v0_33}
"""Each supported minor, oldest first."""


class UnsupportedVllm(ImportError):
    """The adapters were not written for the installed vLLM. vLLM shows the message as a backend's reason."""


def unsupported_reason(found: str) -> str:
    """Return why the adapters do not support this vLLM version; empty if they do."""
    if _minor(found) in VERSIONS:
        return ""
    return (
        f"attn-backends' adapters are for vLLM {' or '.join(VERSIONS)}, got {found}; its classes and cache may differ, "
        f"so none was loaded. Install {requirement()}, or choose one of vLLM's own backends."
    )


def requirement() -> str:
    """Return the newest supported minor as a requirement for pip."""
    return f"vllm=={list(VERSIONS)[-1]}.*"


def registry() -> tuple[Any, Any] | None:
    """Return vLLM's enum of backends and the function that adds to it; None for a vLLM without free names.

    Also of an unsupported vLLM, which then shows the reason to whoever chooses one of our names.
    """
    for places in (version.PLACES for version in VERSIONS.values()):
        with suppress(ImportError, AttributeError):
            enum, register = resolve_name(places["AttentionBackendEnum"]), resolve_name(places["register_backend"])
            if hasattr(enum, "register"):
                return enum, register
    return None


def __getattr__(name: str) -> Any:
    """Return one of vLLM's names. Raises UnsupportedVllm if the installed vLLM is not supported or lacks it."""
    if not any(name in version.PLACES for version in VERSIONS.values()):  # without importing vLLM
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found, places = _installed()
    try:
        return resolve_name(places[name])
    except (KeyError, AttributeError) as error:
        raise _lacking(found, places.get(name, name)) from error


@cache
def _installed() -> tuple[str, dict[str, str]]:
    """Return the version of vLLM and where its names live, once every hook of that version was found."""
    import vllm

    found = str(getattr(vllm, "__version__", "unknown"))
    if reason := unsupported_reason(found):
        raise UnsupportedVllm(reason)
    version = VERSIONS[_minor(found)]
    if missing := [f"{path} ({what})" for path, what in version.HOOKS.items() if not _exists(path)]:
        raise _lacking(found, ", ".join(missing))
    return found, version.PLACES


def _lacking(found: str, what: str) -> UnsupportedVllm:
    return UnsupportedVllm(
        f"attn-backends' adapters build on hooks of vLLM {_minor(found)}, this {found} lacks {what}; its drafts would "
        "not be updated, so none was loaded. Install a released vLLM."
    )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _exists(path: str) -> bool:
    try:
        resolve_name(path)
    except (ImportError, AttributeError):
        return False
    return True
