"""What the doctor asks of every engine with a plug-in of ours."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import entry_points

import attn_backends
from spec_decode.tools.doctor import Finding, FindingStatus

TOPIC = "engines"


def finding(subject: str, reason: str, detail: str) -> Finding:
    """Refused for a reason, or in order."""
    status = FindingStatus.REFUSED if reason else FindingStatus.OK
    return Finding(TOPIC, subject, status, reason or detail)


def why_not_found(group: str, register: str, variable: str) -> str:
    """Why an engine does not find the plug-in, or nothing.

    group: of the entry points that it calls; register: ours; variable: the one that restricts it to some of them.
    """
    allowed = os.environ.get(variable)
    if not any(point.value == register for point in entry_points(group=group)):
        return f"no package declares attn_backends in {group}: install attn-backends again"
    if allowed is not None and "attn_backends" not in allowed.split(","):
        return f"{variable}={allowed} leaves attn_backends out: add it, or unset the variable"
    return ""


def why_not_loaded(name: str) -> Callable[[], str]:
    """What says why one of our backends does not load, or nothing."""

    def ask() -> str:
        try:
            attn_backends.get(name)
        except attn_backends.BackendError as error:
            return str(error)
        return ""

    return ask
