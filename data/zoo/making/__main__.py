"""`python data/zoo/making`: train the zoo's models from their recipes."""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path[0] = str(HERE.parents[1])  # the folder that holds this package, not the package itself
sys.path.append(str(HERE.parents[3]))  # the checkout, where specexp is not installed

from making.recipes import RECIPES  # noqa: E402
from making.train import train_zoo  # noqa: E402
from specexp.errors import UserError  # noqa: E402


def main() -> int:
    """Train what the command line names; returns the exit code."""
    options = argparse.ArgumentParser(prog="data/zoo/making", description=__doc__)
    names = [recipe.name for recipe in RECIPES]
    options.add_argument("--only", action="append", choices=names, help="repeatable; default: all")
    options.add_argument("--out", type=Path, help="default: zoo/models of the store")
    options.add_argument("--device", default="cpu")
    options.add_argument("--quick", action="store_true", help="a few steps, to test the setup")
    arguments = options.parse_args()
    try:
        for folder in train_zoo(
            arguments.only, arguments.out, device=arguments.device, quick=arguments.quick
        ):
            print(f"wrote {folder}")
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return e.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
