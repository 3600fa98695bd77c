"""`python data/zoo/making`: train the zoo's models, as `specexp zoo train` does."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[3])  # the checkout, and not this folder

from specexp.commands.app import main  # noqa: E402

sys.argv[1:1] = ["zoo", "train", "--device=cpu"]
main()
