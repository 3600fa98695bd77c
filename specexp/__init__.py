"""Experiments with speculative decoding: does it pay for your models, text, hardware and load?

These ten names are the public interface; README.md beside this file shows each in three lines. A
name is imported when it is first used, so that `import specexp` loads neither torch nor
transformers.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specexp import theory
    from specexp.api import Pairing, load
    from specexp.drafters import Drafter
    from specexp.engine import Engine
    from specexp.policy import Policy
    from specexp.rules import Rule
    from specexp.sampling import Sampling
    from specexp.trace import Trace
    from specexp.tree import Tree

__all__ = [
    "Drafter", "Engine", "Pairing", "Policy", "Rule", "Sampling", "Trace", "Tree", "load", "theory",
]  # fmt: skip
_HOMES = {
    "Drafter": "drafters", "Engine": "engine", "Pairing": "api", "Policy": "policy",
    "Rule": "rules", "Sampling": "sampling", "Trace": "trace", "Tree": "tree", "load": "api",
}  # fmt: skip

if "OMP_WAIT_POLICY" not in os.environ:
    # Threads of a pass that wait for each other spin for some 50 µs, then sleep. By default they
    # spin for milliseconds, and on a busy machine keep the very thread they wait for from its core.
    # OpenMP reads this when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def __getattr__(name: str) -> Any:
    from importlib import import_module, metadata

    if name == "__version__":
        try:
            return metadata.version("specexp")
        except metadata.PackageNotFoundError:  # a checkout that is not installed
            return "unknown"
    if name == "theory":
        return import_module("specexp.theory")
    if name not in _HOMES:
        raise AttributeError(f"specexp has no {name!r}; it offers {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module(f"specexp.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
