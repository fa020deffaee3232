"""The forms in which kernels read a mask from GPU memory; plain ints, because kernels take them as constants."""

from __future__ import annotations

# Instructions of `stof.masks.gpu_program`; a dense bool mask byte by byte; or four of its bytes, four columns, as one
# int32.
PROGRAM, BYTES, QUADS = range(3)
