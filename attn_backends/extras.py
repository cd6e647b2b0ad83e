"""How to install the dependencies of optional parts of this library."""

from __future__ import annotations


def install_hint(extra: str) -> str:
    """Return the command that installs an extra, for messages. It needs a checkout: no package index has a release."""
    return f"pip install '.[{extra}]' in a checkout of attn-backends"
