"""Options of the compile backend: another path of `stof.integrations.torch`, where they are."""

from stof.integrations.torch import CompileOptions

__all__ = ["CompileOptions"]
