"""Norms, one file per kind. This package imports all of its files, so adding a file registers its kind."""

from importlib import import_module
from pkgutil import iter_modules

from norms.registry import KINDS, TRAITS, build_norm, register

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["KINDS", "TRAITS", "build_norm", "register"]
