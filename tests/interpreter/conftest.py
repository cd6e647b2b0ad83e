import pytest
import torch

from builders.kernels.triton_runtime import HAVE_TRITON, interpreting

if interpreting():
    from tests.interpreter.repairs import repair

    repair()

# Kernels are interpreted only if the variable was set before they were defined: this folder is a separate session,
# TRITON_INTERPRET=1 pytest tests/interpreter, which `make test` runs after the others.
collect_ignore_glob = [] if interpreting() else ["test_*_kernel*.py"]
# torch's own implementations compute no offsets.
collect_ignore = [] if interpreting() or torch.cuda.is_available() else ["test_wide_strides.py"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    """Fail on skips: no other place compares kernels without a GPU."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and HAVE_TRITON:
        report.outcome = "failed"
    return report
