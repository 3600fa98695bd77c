"""Loads and cost tables made up for tests of policies, and servers that are simulated on them."""

import numpy as np

from specexp.policy import Load, Plan, Stream
from specexp.serving.cost_table import Costs
from specexp.serving.goodput import GAMMAS, Acceptance, Choice, Goodput, Prices
from specexp.serving.requests import Request
from specexp.serving.server import Server
from specexp.serving.simulated_rows import SimulatedRows
from specexp.serving.sources import Source, serve
from specexp.trace import Step
from specexp.tree import Tree

BATCHES, CHAINS = (1, 2, 4, 8, 16, 32, 64), (0, 1, 2, 3, 4, 5)


def seconds(
    b: int, gamma: int, floor: float = 1e-2, token: float = 1e-4, draft: float = 5e-4
) -> float:
    """A round: a floor, what each token in the pass adds, and so much for each draft token."""
    return floor + b * (gamma + 1) * token + draft * gamma


def table(dear: dict[int, float] | None = None, packs: bool = False, **law: float) -> Costs:
    """`seconds` as a table; passes of a draft length in `dear` take so many times as long; packs:
    draft tokens that are not made cost nothing."""
    dear = dear or {}
    each = law.pop("draft", 5e-4)
    verify = [[[seconds(b, g, draft=0, **law) * dear.get(g, 1)] for g in CHAINS] for b in BATCHES]
    draft = [[[each * g] for g in CHAINS] for _ in BATCHES]
    return Costs(
        {"passes": "native" if packs else "fused"},
        BATCHES, (512,), np.array(verify), CHAINS, np.array(draft),
        (1, 1000), np.array([1e-3, 1e-1]), np.array([1e-4, 1e-2]),
    )  # fmt: skip


def load(rows: int, *streams: Stream, waiting: int = 0) -> Load:
    return Load(rows, 512, waiting, streams or (Stream(),) * rows)


def chosen(policy, rows: int) -> int:
    plan = policy.choose(load(rows))
    assert not plan.budget
    return plan.tree.depth


def depths(plan: Plan, rows: int) -> list[int]:
    return [plan.depth(row) for row in range(rows)]


def tuned(costs: Costs, gammas: tuple[int, ...] = GAMMAS, **knobs) -> Goodput:
    """Goodput with these knobs, each given to the parts that have it."""
    policy, deepest, used = Goodput(costs, gammas), max(gammas), set()

    def own(part):
        names = vars(part).keys() & knobs.keys()
        used.update(names)
        return type("Tuned", (part,), {name: knobs[name] for name in names})

    policy.acceptance = own(Acceptance)(deepest)
    policy.prices = own(Prices)(costs, deepest)
    policy.choice = own(Choice)()
    assert used == knobs.keys()
    return policy


def informed(kept: list[int], costs: Costs, **knobs) -> Goodput:
    """Goodput that has seen long drafts of which so many tokens were kept, and believes exactly
    that."""
    believing = {"prior_tokens": 1e-9, "fade": 1.0, "margin": 0.0, "interval": 0}
    policy = tuned(costs, **(believing | knobs))
    deepest = max(policy.gammas)
    steps = [Step(0, deepest, k, k + 1) for k in kept]
    policy.learn(load(2), Plan(Tree.chain(deepest)), steps, None)
    policy.digest()
    policy.choice.left = 0
    return policy


class Recorded:
    """A policy, and what it chose when."""

    def __init__(self, policy):
        self.policy, self.choices = policy, []

    @property
    def widest(self):
        return self.policy.widest

    def choose(self, load):
        self.choices.append((load, self.policy.choose(load)))
        return self.choices[-1][1]

    def learn(self, *outcome):
        self.policy.learn(*outcome)

    def drafts(self) -> list[int]:
        """The longest draft of every round."""
        return [plan.tree.depth for _, plan in self.choices]


def alike(chance: float, depth: int = 5):
    return lambda stream: [chance] * depth


def closed_loop(
    policy, costs, conditional, streams: int, count: int, new: int = 200, seed: int = 0
):
    """A closed loop of `count` requests on a bank that these costs are true of."""
    bank = SimulatedRows(costs, conditional, streams, 512, policy.widest, seed)
    server = Server(bank, policy, chunk=4096)
    todo = [Request(range(20), new - 7 * (i % 5), stream=i) for i in range(count)]
    serve(server, Source(todo, streams))
    return server


def speed(server: Server) -> float:
    return sum(t.emitted for t in server.steps) / server.now
