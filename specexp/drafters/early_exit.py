"""Draft with the target's own first layers, its final norm and its LM head (self-speculation).

(Zhang et al. 2023, Draft & Verify; Elhoushi et al. 2024, LayerSkip, section 4.3.) The draft shares
the target's weights and cache. The target has already filled the first layers' cache for the
committed tokens, so there is nothing to catch up on, and verifying overwrites the entries written
while drafting. It pays for targets trained for early exit; for others, try several values of K.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from specexp.drafters import Drafter, Prepared, Request
from specexp.errors import UserError, counted, refusing
from specexp.growth import Level, grow
from specexp.models.lm import LM
from specexp.models.load import of_module
from specexp.models.scans import twin
from specexp.sampling import Rng, Sampling
from specexp.sequences import Draft, Sequences
from specexp.tree import Tree


class EarlyExit(Drafter):
    """Drafts as a draft model does, with the first `layers` layers of the target."""

    draws = True

    def __init__(self, target: LM, layers: int, sampling: Sampling) -> None:
        self.name = f"first {counted(layers, 'layer')} of {target.name}"
        self.target, self.sampling = target, sampling
        with refusing(f"early_exit cannot leave {target.name}"):
            self.lm = of_module(first_layers(target.module, layers), self.name, target.vocab)
        self.models: tuple[LM, ...] = (self.lm,)
        self.context = target.context

    def allocate(self, B: int, S: int) -> None:
        self.lm.cache = self.target.cache
        self.lm.fault = torch.zeros_like(self.target.fault)

    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        def step(level: Level) -> Tensor:
            return self.lm.feed(seqs, level.tokens, *level.placed(seqs)).logits

        return grow(seqs, tree, step, self.sampling, rng)


def first_layers(module: Any, layers: int) -> Any:
    """The model with only its first `layers` layers: weights are shared, not copied.

    Raises UserError if the model does not hold its layers in an nn.ModuleList.
    """
    L = module.config.num_hidden_layers
    modules = module.named_modules()
    lists = [name for name, m in modules if isinstance(m, nn.ModuleList) and len(m) == L]
    if not lists:
        raise UserError(
            f"early_exit cannot leave {type(module).__name__}: it has no list of its {L} layers: "
            "use another drafter"
        )
    *within, name = lists[0].split(".")
    top = twin(module)
    parts = [top.get_submodule(".".join(within[:depth])) for depth in range(len(within) + 1)]
    setattr(parts[-1], name, getattr(parts[-1], name)[:layers])
    config = copy.copy(module.config)
    config.num_hidden_layers = layers
    for part in parts:
        part.config = config
    return top


def prepare(request: Request) -> Prepared:
    """`early_exit:K`: exit after K layers, by default a quarter of them."""
    L = request.config.num_hidden_layers
    layers = request.integer(default=max(1, L // 4))
    if layers >= L:
        raise UserError(
            f"drafter early_exit:{layers}: {request.target} has {L} layers: leave before the "
            "last one"
        )
    if n := getattr(request.config, "num_kv_shared_layers", 0):
        raise UserError(
            f"early_exit cannot leave {request.target}: its last {n} layers have no keys of their "
            "own: use another drafter"
        )
    return Prepared(lambda target: EarlyExit(target, layers, request.sampling), draws=True)
