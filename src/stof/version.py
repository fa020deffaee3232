"""The version of the package; a module of its own because modules below `stof/__init__.py` read it."""

__version__ = "0.2.0"
