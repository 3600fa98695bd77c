"""What the networks of drafters say by the papers' definitions, computed without any cache."""

import torch
from support.tiny import V, module


@torch.no_grad()
def states(text: list[int], taps) -> torch.Tensor:
    """[len(text) - 1, taps*E]: the target's states over all but the last token."""
    out = module()(torch.tensor([text[:-1]]), use_cache=False, output_hidden_states=True)
    return torch.cat([out.hidden_states[t][0] for t in taps], -1)


def causal(n: int) -> torch.Tensor:
    return torch.full((n, n), -1e300, dtype=torch.float64).triu(1)[None, None]


@torch.no_grad()
def eagle_law(net, text: list[int], path: list[int]) -> torch.Tensor:
    """Log-probabilities [V] after a path of draft tokens, by running the layer over the whole chain
    of pairs again for every draft token."""
    features = net.fuse(states(text, net.shape.taps))
    tokens = torch.tensor(text[1:])
    for ahead in range(len(path) + 1):
        n = len(tokens)
        output = net.features(
            tokens[None], features[None], torch.arange(n)[None], attention_mask=causal(n)
        )
        features = torch.cat([features, output[0, -1:]])
        tokens = torch.cat([tokens, torch.tensor(path[ahead : ahead + 1])])
    law = net.draft_logits(output[0, -1]).log_softmax(-1)
    ids = net.draft_ids if net.shape.fused else torch.arange(V)
    return torch.full((V,), -torch.inf, dtype=law.dtype).index_copy(0, ids, law)


def eagle_says(net, text: list[int], count: int) -> list[int]:
    drafted: list[int] = []
    for _ in range(count):
        drafted.append(int(eagle_law(net, text, drafted).argmax()))
    return drafted


@torch.no_grad()
def mtp_says(net, text: list[int], count: int) -> list[int]:
    """By transformers' own layer, over the whole chain of pairs again for every draft token."""
    [model] = net.borrowed
    features, tokens = states(text, (2,)), text[1:]
    for _ in range(count):
        inputs = {"input_ids": torch.tensor([tokens]), "mtp_cache": None}
        at = torch.arange(len(tokens))[None]
        out = model.forward_layer(0, features[None], at, **inputs)[0, -1:]
        features = torch.cat([features, out])
        tokens = [*tokens, int(model.shared_head(out).argmax())]
    return tokens[-count:]


@torch.no_grad()
def medusa_says(net, text: list[int], count: int) -> list[int]:
    return net(states(text, (2,))[-1]).argmax(-1).tolist()[:count]


@torch.no_grad()
def parallel_says(net, text: list[int], count: int) -> list[int]:
    """With a mask, here V - 1, for every token after the first that is not known."""
    read = torch.tensor([[*text, *[V - 1] * (count - 1)]])
    return net(read, use_cache=False).logits[0, -count:].argmax(-1).tolist()


@torch.no_grad()
def law_after(kind: str, drafter, text: list[int], path: list[int]) -> torch.Tensor:
    """Log-probabilities [V] of the drafter after a path, without any cache."""
    if kind == "medusa":
        return drafter.heads(states(text, (2,))[-1])[len(path)].log_softmax(-1)
    if kind.startswith("eagle"):
        return eagle_law(drafter.net, text, path)
    net = drafter.lm.module
    return net(torch.tensor([text + path]), use_cache=False).logits[0, -1].log_softmax(-1)


def likeliest(says, count: int, depth: int, width: int) -> set[tuple[int, ...]]:
    """EAGLE-2's tree by the book: beams of `width`, then the likeliest of all that came up."""
    beams, scored = [((), 0.0)], []
    for _ in range(depth):
        children = []
        for path, score in beams:
            law = says(list(path))
            children += [
                ((*path, t), score + float(law[t])) for t in law.topk(width).indices.tolist()
            ]
        scored += children
        beams = sorted(children, key=lambda pair: -pair[1])[:width]
    return {path for path, _ in sorted(scored, key=lambda pair: -pair[1])[:count]}
