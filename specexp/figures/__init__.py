"""Tables in, figures out. Nothing here measures or imports torch.

    from specexp import figures
    figures.pairings.by_category(samples)

Each file is loaded when it is first named.
"""

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

__all__ = [module.name for module in iter_modules(__path__)]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
