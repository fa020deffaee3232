"""As for the kernels: Triton's interpreter computes bfloat16 as a GPU does."""

from tests.kernels.conftest import _as_on_a_gpu

__all__ = ["_as_on_a_gpu"]
