from builders.kernels.triton_runtime import interpreting

# Kernels are interpreted only where the variable was set before they were defined: tests/test_interpreter_suite.py
# runs this folder in a process of its own.
collect_ignore_glob = [] if interpreting() else ["test_*.py"]
