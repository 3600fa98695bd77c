"""Recipes of training: schedules with their mix of text, and heads of each kind.

Also the tokens of the zoo's models, which the twins share.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specexp.errors import UserError, meant

VOCABULARY = 4096
END = 0  # id of <|endoftext|>: the BOS, EOS and padding token


@dataclass(frozen=True)
class Phase:
    """`steps` steps of `batch` rows of `length` tokens."""

    steps: int
    batch: int
    length: int


@dataclass(frozen=True)
class Course:
    """Consecutive phases with one mix of text and one learning-rate schedule.

    `repeats`: how often a kind of text occurs per epoch; 1 if absent."""

    phases: tuple[Phase, ...]
    repeats: Mapping[str, int] = field(default_factory=dict)
    muon_lr: float = 0.02
    adam_lr: float = 3e-3

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @property
    def tokens(self) -> int:
        return sum(phase.steps * phase.batch * phase.length for phase in self.phases)

    def pace(self, step: int) -> float:
        """Factor on the learning rates: a short warm-up, a plateau, a linear decay to 2 %."""
        warm, fall = max(1, self.steps // 40), int(0.35 * self.steps)
        rest = (self.steps - step) / (self.steps - fall)
        return min(1.0, (step + 1) / warm, max(0.02, rest))

    def quick(self, steps: int = 4) -> "Course":
        """The same mix of text for a few short steps, for a smoke test."""
        return replace(self, phases=(Phase(steps, 4, 64), Phase(steps // 2, 2, 128)))


@dataclass(frozen=True)
class HeadRecipe:
    """Heads for a target: `heads` and `layers` (Medusa), `hidden` and `draft_vocab` (EAGLE), or
    those, `layers` and `more` of a `BlockShape` (DFlash and its kin). `draft_vocab` 0: a block can
    draft every token."""

    kind: str  # "medusa", "eagle", "eagle3", "dflash", "dflash2" or "dspark"
    about: str
    courses: tuple[Course, ...]
    heads: int = 3
    layers: int = 1
    hidden: int = 512
    draft_vocab: int = 2048
    more: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 5

    def quick(self) -> "HeadRecipe":
        courses = tuple(course.quick() for course in self.courses)
        return replace(self, courses=courses, hidden=64, draft_vocab=min(self.draft_vocab, 256))


FOLLOW = {"prose": 2, "continued": 3}
_EAGLE = (Course((Phase(600, 32, 256), Phase(60, 8, 1024)), FOLLOW),)
_BLOCK = (Course((Phase(900, 32, 256), Phase(60, 8, 1024)), FOLLOW),)
_HEADS = (
    HeadRecipe(
        "medusa",
        "Medusa heads: three draft tokens from the target's last hidden state.",
        (
            Course((Phase(320, 32, 256),), FOLLOW, adam_lr=1.5e-3),
            Course((Phase(700, 32, 256),), FOLLOW, adam_lr=2e-3),
        ),
    ),
    HeadRecipe(
        "eagle", "An EAGLE-1 layer: autoregression on the target's last hidden state.", _EAGLE
    ),
    HeadRecipe(
        "eagle3",
        "An EAGLE-3 layer: autoregression on hidden states from three depths of the target.",
        _EAGLE,
    ),
    HeadRecipe(
        "dflash",
        "A DFlash block: seven draft tokens in one pass, from hidden states of three depths.",
        _BLOCK,
        layers=2,
    ),
    HeadRecipe(
        "dflash2",
        "A DFlash 2 block: seven draft tokens in one pass, each chosen to follow the one before.",
        _BLOCK,
        layers=2,
        draft_vocab=0,
        more={"rank": 64, "candidates": 16, "kernel": 2, "group": 16},
    ),
    HeadRecipe(
        "dspark",
        "A DSpark block: seven draft tokens in one pass, each corrected by the token before.",
        _BLOCK,
        layers=2,
        more={"rank": 64},
    ),
)
HEADS = {recipe.kind: recipe for recipe in _HEADS}


def insist_on_heads(kind: str) -> None:
    """Raise UserError for a kind of heads that cannot be trained."""
    if kind not in HEADS:
        raise UserError(f"heads {kind!r} are unknown{meant(kind, HEADS)} ({', '.join(HEADS)})")
