"""Recipes of the shipped models: shape, schedule, mix of text, teacher.

This file does not know about the text itself, files or training loops.
"""

from dataclasses import dataclass, replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specexp.zoo.recipes import END, FOLLOW, VOCABULARY, Course, Phase

CONTEXT = 1024


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
        Course((Phase(340, 32, 256), Phase(60, 8, 1024)), FOLLOW),
        Course((Phase(620, 32, 256),), FOLLOW, muon_lr=0.015, adam_lr=2e-3),
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
    courses=(Course((Phase(180, 32, 256), Phase(30, 8, 1024)), FOLLOW),),
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
    about="The negative control: random weights, so its draft tokens are almost never accepted.",
    layers=2,
    width=64,
    hidden=128,
    heads=2,
    kv_heads=1,
    seed=3,
)
RECIPES = (TARGET, SIBLING_3M, SIBLING_1M, EXIT_TARGET, RANDOM)


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
