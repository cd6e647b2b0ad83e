"""The names exported by spec_decode.models."""

import pytest

from spec_decode import models


def test_every_listed_name_is_there() -> None:
    pytest.importorskip("transformers")
    assert {name for name in models.__all__ if not hasattr(models, name)} == set()
    assert "TransformersTarget" in models.__all__


def test_missing_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'spec_decode\.models' has no attribute 'TransformerTarget'"):
        models.TransformerTarget  # noqa: B018
