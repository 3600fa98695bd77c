"""Checks of drafters, rules and policies that do not ship with specexp, before they are used.

First their interfaces (`drafter`, `rule`, `policy`); then a few rounds on two short rows, in which
everything that they return is read on the host (`try_out`). These rounds run on copies, of drafter
and rule in checking wrappers. Afterwards the user's own objects run without any wrapper, so timings
are not affected. What a policy chooses is always checked (`policy.planned`), and so are the tokens
of a drafter that computes on the host (`Engine.draft`).
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from specexp.drafters import Drafter
from specexp.drafters.model import check_device_and_dtype
from specexp.engine import Engine
from specexp.errors import UserError
from specexp.models.lm import LM
from specexp.objects import check_takes, construct, is_shipped
from specexp.policy import Policy
from specexp.recording import Recorder
from specexp.sampling import Rng
from specexp.sequences import Draft, Sequences, Verdict, outside
from specexp.tree import Tree

_NEW = 6  # tokens per row in the rounds of `try_out`
_SUM = 1e-3  # how far the sum of a distribution may be from 1


def policy(thing: Any) -> Policy:
    """The policy itself, or an instance of the class. Raises UserError for anything else."""
    if isinstance(thing, type):
        thing = construct("policy", thing.__name__, thing)
    about = f"policy {type(thing).__name__}"
    for method, arguments in (("choose", "load"), ("learn", "load, plan, steps, seconds")):
        if not callable(getattr(thing, method, None)):
            raise UserError(f"{about} has no {method}({arguments}): define it (see specexp.Policy)")
        check_takes(f"{about}.{method}", getattr(thing, method), arguments)
    if not isinstance(getattr(thing, "widest", None), int):
        raise UserError(
            f"{about} has no whole number `widest`: give the room of the largest tree that it may "
            "choose, such as Tree.chain(5).room"
        )
    return cast(Policy, thing)


def drafter(thing: Drafter, target: LM) -> None:
    """Raise UserError for a drafter that the engine cannot call, or whose models do not fit the
    target."""
    about = f"drafter {thing.name}"
    for method, arguments in (
        ("allocate", "B, S"), ("prefill", "seqs, hidden"), ("catch_up", "seqs, missed"),
        ("propose", "seqs, tree, rng"), ("observe", "seqs, draft, verdict, seen"),
    ):  # fmt: skip
        check_takes(f"{about}: {method}", getattr(thing, method), arguments)
    layers = target.config.num_hidden_layers
    if any(not 0 <= tap <= layers for tap in thing.taps):
        raise UserError(
            f"{about} taps the hidden states {thing.taps} of a target with {layers} layers: use 0 "
            f"(embeddings) to {layers}"
        )
    for model in thing.models:
        check_device_and_dtype(model, target)


def try_out(engine: Engine) -> None:
    """Run a few rounds with copies of the engine's drafter, rule and policy and check what they
    return. Raises UserError, one line that names the object; exceptions of the object's own code
    stay what they are. Does nothing if all three ship with specexp."""
    if is_shipped(engine.drafter) and is_shipped(engine.rule) and is_shipped(engine.policy):
        return
    target = engine.target
    a, b, c = (number * 7919 % target.vocab for number in (1, 2, 3))
    rows = [[a, b, a, b, a, b], [c]]
    new = min(_NEW, target.context - len(rows[0]))
    drafter, policy = _spare(engine.drafter, target), _spare(engine.policy, target)
    rule, V = engine.rule, target.vocab
    trial = Engine(
        target,
        _checking(drafter, f"drafter {drafter.name}", "propose", partial(_faults_of_draft, V)),
        policy,
        engine.sampling,
        _checking(rule, f"rule {rule.name}", "__call__", partial(_faults_of_verdict, V)),
        engine.seed, limits=engine.limits, recorder=Recorder(),
    )  # fmt: skip
    if new > 0:
        trial.generate(rows, new)


def copied(thing: Any, target: LM, stand_in: LM) -> Any:
    """A deep copy that shares the weights of models and has `stand_in` in place of the target."""
    memo: dict[int, Any] = {id(target): stand_in}
    parts = [*getattr(thing, "__dict__", {}).values()]
    parts += [part for own in parts if isinstance(own, Drafter) for part in vars(own).values()]
    memo |= {id(part): part for part in parts if isinstance(part, nn.Module)}
    others = (model for model in getattr(thing, "models", ()) if model is not target)
    memo |= {id(model): model.apart() for model in others}
    return copy.deepcopy(thing, memo)


def _spare(thing: Any, target: LM) -> Any:
    """A copy for a trial; the object itself if it cannot be copied."""
    try:
        return copied(thing, target, target)
    except Exception:  # it holds a file, a lock or a graph of gradients
        return thing


def _checking(own: Any, about: str, method: str, faults: Callable[..., Iterator[str]]) -> Any:
    """A stand-in for an object in the rounds of `try_out`. What its method returns is checked by
    `faults(result, *arguments)`, of which the first one is raised."""

    def call(_: object, *arguments: Any) -> Any:
        result = getattr(own, method)(*arguments)
        for fault in faults(result, *arguments):
            raise UserError(f"{about} {fault}")
        return result

    return type("Checking", (), {
        method: call, "__getattr__": lambda _, name: getattr(own, name),
    })()  # fmt: skip


def _faults_of_draft(V: int, draft: Any, seqs: Sequences, tree: Tree, rng: Rng) -> Iterator[str]:
    if not isinstance(draft, Draft):
        yield f"proposed a {type(draft).__name__}: return seqs.draft(nodes, tokens)"
    tokens, (B, N) = draft.tokens, (len(seqs.tokens), len(tree))
    *rows, drafted = tokens.shape
    if tokens.shape != (B, N) or draft.nodes.parents.shape[-1] != N:
        yield (
            f"proposed tokens {[*rows, drafted - 1]} over {draft.nodes.parents.shape[-1]} nodes "
            f"for a tree of {N} nodes in {B} rows: propose one token, or -1 for none, for each "
            f"node but the root, [{B}, {N - 1}]"
        )
    if tokens.dtype != torch.int64 or tokens.device != seqs.device:
        yield (
            f"proposed tokens in {str(tokens.dtype)[6:]} on {tokens.device}: make them int64 on "
            f"{seqs.device}"
        )
    if fault := draft.outside(V):
        yield fault
    if not torch.equal(tokens[:, :1], seqs.root):
        yield "changed the root: node 0 is the last committed token; use seqs.draft(nodes, tokens)"
    if draft.q is not None:
        yield from _faults_of_q(draft, (B, N, V))


def _faults_of_q(draft: Draft, shape: tuple[int, int, int]) -> Iterator[str]:
    q = draft.q
    if not isinstance(q, Tensor) or q.shape != shape or not q.is_floating_point():
        kind = f"{list(q.shape)} in {q.dtype}" if isinstance(q, Tensor) else type(q).__name__
        yield (
            f"returned q {kind}: it must be floating-point {list(shape)}, one distribution over "
            "the vocabulary for the children of each node"
        )
    assert q is not None
    children = draft.nodes.children.expand(len(q), -1, -1)
    tokens = draft.tokens.gather(1, children.clamp(min=0).flatten(1)).view_as(children)
    drawn = ((children >= 0) & (tokens >= 0)).any(-1)
    rows = q.float()[drawn]
    rows = rows[(rows != 0).any(-1)]  # others were chosen
    if not rows.numel():
        return
    if not bool((rows.isfinite() & (rows >= 0)).all()):
        yield "returned a q with negative or non-finite entries: it must be a distribution"
    sums = rows.sum(-1)
    worst = float(sums[(sums - 1).abs().argmax()])
    if abs(worst - 1) > _SUM:
        yield (
            f"returned a q that sums to {worst:.4g}: it must be the distribution from which a "
            "node's children were drawn, with sum 1 (0 everywhere, or q=None: they were chosen)"
        )


def _faults_of_verdict(V: int, verdict: Any, draft: Draft, p: Tensor, rng: Rng) -> Iterator[str]:
    if not isinstance(verdict, Verdict):
        yield f"returned a {type(verdict).__name__}: return draft.judged(path, n, bonus)"
    (B, N), D = draft.tokens.shape, draft.nodes.deepest
    path, n, new = verdict.path, verdict.n, verdict.new
    parts = {"path": (path, (B, D + 1)), "n": (n, (B,)), "new": (new, (B, D + 1))}
    for part, (value, shape) in parts.items():
        if value.shape != shape or value.dtype != torch.int64:
            yield (
                f"returned {part} {list(value.shape)} in {str(value.dtype)[6:]}: it must be "
                f"{list(shape)} in int64"
            )
    for node in outside(path, 0, N):
        yield f"returned a path through node {node} of a draft of {N} nodes: use 0 to {N - 1}"
    for count in outside(n, 0, D + 1):
        yield f"accepted {count} draft tokens of a draft {D} deep: n must be 0 to {D}"
    parents = torch.take_along_dim(draft.nodes.parents, path, 1)
    step = torch.arange(1, D + 1, device=path.device) <= n[:, None]  # [B, D]
    if bool((path[:, 0] != 0).any()) or bool(((parents[:, 1:] != path[:, :-1]) & step).any()):
        yield "returned a path that is none: start at the root, node 0, and go to a child each time"
    tokens = draft.tokens.gather(1, path)[:, 1:]
    if bool(((tokens < 0) & step).any()):
        yield "accepted a node without a draft token (-1)"
    if bool(((tokens != new[:, :-1]) & step).any()):
        yield "emits other tokens than it accepted: new[:, i] is the token of path[:, i + 1]"
    for bonus in outside(new.gather(1, n[:, None]), 0, V):
        yield f"emits token {bonus}, outside the vocabulary of {V} tokens"
