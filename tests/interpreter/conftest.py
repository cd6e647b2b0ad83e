import pytest

from builders._triton import interpreting


def pytest_collection_modifyitems(items):
    """Kernels are interpreted only where the variable was set before they were defined."""
    if not interpreting():
        for item in items:
            if "/tests/interpreter/" in item.path.as_posix():
                item.add_marker(
                    pytest.mark.skip(reason="run by tests/test_interpreter_suite.py, in a process of its own")
                )
