"""A drafter, a rule and a policy as a reader would write them in a notebook cell."""

import torch

import specexp
from specexp.policy import Plan


class Echo(specexp.Drafter):
    """The text repeats itself after `period` tokens."""

    def __init__(self, period=2):
        self.period, self.calls = period, []

    def propose(self, seqs, tree, rng):
        self.calls.append(tree)
        nodes = tree.nodes(seqs.tokens.device)
        depth = nodes.depth[:, 1:]
        back = seqs.places(depth) - self.period * (1 + (depth - 1) // self.period)
        tokens = seqs.tokens.gather(1, back.clamp(min=0))
        return seqs.draft(nodes, torch.where(back >= 0, tokens, -1))


class Ones(specexp.Drafter):
    """Every token is 1."""

    def propose(self, seqs, tree, rng):
        nodes = tree.nodes(seqs.tokens.device)
        return seqs.draft(nodes, torch.ones_like(nodes.depth[:, 1:].expand(len(seqs.tokens), -1)))


class Fade(specexp.Rule):
    """Follow the target's own samples, as Match does, but keep the first draft token at most."""

    def __call__(self, draft, p, rng):
        sample = rng.categorical(p, draft.keys, 1)
        wanted = sample.gather(1, draft.nodes.parents.expand_as(sample))
        path, n = draft.nodes.accepted((draft.tokens == wanted) & (draft.nodes.depth <= 1))
        return draft.judged(path, n, sample.gather(1, path.gather(1, n[:, None]))[:, 0])


class Alternate(specexp.Policy):
    """Draft gamma tokens every other round."""

    def __init__(self, gamma=3):
        self.gamma, self.rounds = gamma, 0

    @property
    def widest(self):
        return specexp.Tree.chain(self.gamma).room

    def choose(self, load):
        self.rounds += 1
        return Plan(specexp.Tree.chain(self.gamma * (self.rounds % 2)))

    def learn(self, load, plan, steps, seconds):
        pass
