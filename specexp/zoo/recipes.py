"""Recipes of the zoo's models: shapes, step counts, learning rates and mixes of text.

This file does not know about the text itself, files or training loops.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 4096
CONTEXT = 1024
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

    `repeats`: how often a kind of text occurs per epoch; 1 if absent.
    """

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

    def place(self, step: int) -> tuple[int, int]:
        """The index of the phase that a step is in, and the step within that phase."""
        for number, phase in enumerate(self.phases):
            if step < phase.steps:
                return number, step
            step -= phase.steps
        raise IndexError("past the last step of the course")

    def pace(self, step: int) -> float:
        """Factor on the learning rates: a short warm-up, a plateau, a linear decay to 2 %."""
        warm, fall = max(1, self.steps // 40), int(0.35 * self.steps)
        rest = (self.steps - step) / (self.steps - fall)
        return min(1.0, (step + 1) / warm, max(0.02, rest))

    def quick(self, steps: int = 4) -> "Course":
        """The same mix of text for a few short steps, for a smoke test."""
        return replace(self, phases=(Phase(steps, 4, 64), Phase(steps // 2, 2, 128)))


@dataclass(frozen=True)
class Recipe:
    """One model: its shape, its courses in order, and the teacher that it is distilled from.

    `exits`: layers after which its norm and head must also predict the next token.
    """

    name: str
    role: str  # "target", "draft" or "control"
    about: str
    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    courses: tuple[Course, ...] = ()
    teacher: str | None = None
    exits: tuple[int, ...] = ()
    seed: int = 0

    def build(self) -> LlamaForCausalLM:
        """The untrained model in float32, initialised from the recipe's seed."""
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.width,
            intermediate_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.width // self.heads,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=END,
            eos_token_id=END,
            pad_token_id=END,
        )
        torch.manual_seed(self.seed)
        return LlamaForCausalLM(config).float()


TARGET = Recipe(
    name="target-10m",
    role="target",
    about="The default target: the model whose output distribution is kept.",
    layers=12,
    width=256,
    hidden=704,
    heads=4,
    kv_heads=2,
    courses=(
        Course(
            (Phase(1000, 32, 256), Phase(400, 16, 512), Phase(120, 8, 1024)),
            {"prose": 2, "echoes": 0},
        ),
        Course((Phase(180, 16, 512),), {"edits": 3, "echoes": 3}, muon_lr=0.01, adam_lr=1.5e-3),
    ),
)
_FOLLOW = {"prose": 2, "continued": 3}
SIBLING_3M = Recipe(
    name="sibling-3m",
    role="draft",
    about="The default draft model: two layers distilled from target-10m.",
    layers=2,
    width=256,
    hidden=1024,
    heads=4,
    kv_heads=2,
    courses=(
        Course((Phase(340, 32, 256), Phase(60, 8, 1024)), _FOLLOW),
        Course((Phase(620, 32, 256),), _FOLLOW, muon_lr=0.015, adam_lr=2e-3),
    ),
    teacher="target-10m",
    seed=1,
)
SIBLING_1M = Recipe(
    name="sibling-1m",
    role="draft",
    about="A cheaper and worse draft model: one narrow layer distilled from target-10m.",
    layers=1,
    width=128,
    hidden=1024,
    heads=2,
    kv_heads=1,
    courses=(Course((Phase(180, 32, 256), Phase(30, 8, 1024)), _FOLLOW),),
    teacher="target-10m",
    seed=2,
)
EXIT_TARGET = Recipe(
    name="target-exit-1m",
    role="target",
    about="A target trained for early exit after its first layers (self-speculation).",
    layers=4,
    width=128,
    hidden=352,
    heads=2,
    kv_heads=1,
    courses=(Course((Phase(900, 32, 256), Phase(100, 8, 1024)), {"prose": 2, "edits": 2}),),
    exits=(1, 2),
    seed=4,
)
RANDOM = Recipe(
    name="random-tiny",
    role="control",
    about="The negative control: random weights, so its guesses are almost never accepted.",
    layers=2,
    width=64,
    hidden=128,
    heads=2,
    kv_heads=1,
    seed=3,
)
RECIPES = (TARGET, SIBLING_3M, SIBLING_1M, EXIT_TARGET, RANDOM)


@dataclass(frozen=True)
class HeadRecipe:
    """Heads for a target: `heads` and `layers` (Medusa), `hidden` and `draft_vocab` (EAGLE).

    `unroll`: passes of EAGLE in training, each on the output of the one before (training-time test,
    Li et al. 2025, EAGLE-3, section 3.2).
    """

    kind: str  # "medusa", "eagle" or "eagle3"
    about: str
    courses: tuple[Course, ...]
    heads: int = 3
    layers: int = 1
    hidden: int = 512
    draft_vocab: int = 2048
    unroll: int = 3
    seed: int = 5

    def quick(self) -> "HeadRecipe":
        courses = tuple(course.quick() for course in self.courses)
        return replace(self, courses=courses, hidden=64, draft_vocab=256)


HEADS = {
    recipe.kind: recipe
    for recipe in (
        HeadRecipe(
            "medusa",
            "Medusa heads: three guesses from the target's last hidden state.",
            (
                Course((Phase(320, 32, 256),), _FOLLOW, adam_lr=1.5e-3),
                Course((Phase(700, 32, 256),), _FOLLOW, adam_lr=2e-3),
            ),
        ),
        HeadRecipe(
            "eagle",
            "An EAGLE-1 layer: autoregression on the target's last hidden state.",
            (Course((Phase(600, 32, 256), Phase(60, 8, 1024)), _FOLLOW),),
        ),
        HeadRecipe(
            "eagle3",
            "An EAGLE-3 layer: autoregression on hidden states from three depths of the target.",
            (Course((Phase(600, 32, 256), Phase(60, 8, 1024)), _FOLLOW),),
        ),
    )
}


def quick_version(recipe: Recipe, steps: int = 4) -> Recipe:
    """The same recipe with narrow layers and a few short steps, for a smoke test."""
    return replace(
        recipe,
        layers=min(recipe.layers, 2),
        width=64,
        hidden=128,
        heads=2,
        kv_heads=1,
        exits=recipe.exits[:1],
        courses=tuple(course.quick(steps) for course in recipe.courses),
    )
