"""What a reader finds in spec_decode.models, and what is loaded only when it is asked for."""

import subprocess
import sys

import pytest

from spec_decode import models

LOADED = "import sys; from spec_decode.models import load_draft; print('transformers' in sys.modules)"


def test_every_listed_name_is_there() -> None:
    pytest.importorskip("transformers")
    assert {name for name in models.__all__ if not hasattr(models, name)} == set()
    assert "TransformersTarget" in models.__all__


def test_transformers_is_not_loaded_for_the_other_names() -> None:
    found = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False"]


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'spec_decode\.models' has no attribute 'TransformerTarget'"):
        models.TransformerTarget  # noqa: B018
