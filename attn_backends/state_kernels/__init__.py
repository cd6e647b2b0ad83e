"""Triton kernels of recurrent state, each op beside its definition: the plain torch of `TorchState`."""
