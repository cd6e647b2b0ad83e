"""The adapters' own kernels."""
