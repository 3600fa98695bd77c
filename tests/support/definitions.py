"""What the networks of drafters say by the papers' definitions, computed without any cache."""

import functools

import torch
from support.tiny import V, module
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb


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
def peagle_says(net, text: list[int], count: int) -> list[int]:
    """By one pass of the layers over the pairs of the text and `count` - 1 of masks."""
    unknown = net.mask_hidden[0].expand(count - 1, -1)
    features = net.fuse(torch.cat([states(text, net.shape.taps), unknown]))
    tokens = torch.tensor([*text[1:], *[net.shape.mask] * (count - 1)])
    n = len(tokens)
    made = net.features(
        tokens[None], features[None], torch.arange(n)[None], attention_mask=causal(n)
    )
    return net.draft_ids[net.draft_logits(made[0, -count:]).argmax(-1)].tolist()


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
def around(layer, name: str, part, x: torch.Tensor) -> torch.Tensor:
    """A part of a layer for inputs x [places, E], with its convolution if it has one: each place's
    mix with those before it, of the input and of the output."""
    conv = getattr(layer, name, None)
    if conv is None:
        return part(x)
    own = conv.kernel_projection(x).view(len(x), *conv.base_kernel.shape[:2], -1)
    weights = conv.base_kernel + own.repeat_interleave(conv.group, -1)

    def mixed(values: torch.Tensor, side: int) -> torch.Tensor:
        rows = torch.zeros_like(values)
        for at, kernel in enumerate(weights[:, side]):
            for tap, weight in enumerate(kernel[: at + 1]):
                rows[at] += weight * values[at - tap]
        return rows

    return mixed(part(mixed(x, 0)), 1)


def block_hidden(net, text: list[int], count: int) -> torch.Tensor:
    """[places, E]: by every layer in turn, each place's attention by itself, in a list of all keys
    of the text and the block."""
    shape, n = net.shape, len(text)
    features = net.fuse(states(text, shape.taps))
    tokens = [text[-1], *[shape.mask] * (count - shape.from_root)]
    x = torch.nn.functional.embedding(torch.tensor(tokens), net.borrowed[0].weight)
    at = torch.arange(n - 1 + len(tokens))[None]
    cos, sin = (part[0] for part in net.rotary(x[None], at))
    for layer, (window, causal) in zip(net.layers, shape.spans, strict=True):
        own, H, d = layer.self_attn, net.config.num_attention_heads, net.config.head_dim

        def attention(x, own=own, H=H, d=d, window=window, causal=causal):
            read = torch.cat([features, x])
            turn = functools.partial(apply_rotary_pos_emb, cos=cos, sin=sin, unsqueeze_dim=1)
            queries = own.q_norm(own.q_proj(read).view(len(read), H, d))
            keys = own.k_norm(own.k_proj(read).view(len(read), -1, d)).repeat_interleave(2, 1)
            queries, keys = turn(queries, keys)
            values = own.v_proj(read).view(len(read), -1, d).repeat_interleave(2, 1)
            mixed = []
            for place in range(n - 1, len(read)):
                seen = [
                    key for key in range(len(read))
                    if (key <= place or not causal) and (not window or abs(place - key) < window)
                ]  # fmt: skip
                scores = torch.einsum("hd,khd->hk", queries[place], keys[seen]) / d**0.5
                mixed.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values[seen]).flatten())
            return own.o_proj(torch.stack(mixed))

        x = x + around(layer, "attention_conv", attention, layer.input_layernorm(x))
        x = x + around(layer, "mlp_conv", layer.mlp, layer.post_attention_layernorm(x))
    return net.norm(x)[-count:]


def selected(selector, logits: torch.Tensor, last: int, state: torch.Tensor) -> torch.Tensor:
    """[V]: of the likeliest tokens, the logit and the product of three vectors; -inf of others."""
    scores = torch.full_like(logits, -torch.inf)
    left = selector.predecessor_codebook[last] * (selector.hidden_projection.weight @ state)
    for token in logits.topk(selector.count).indices.tolist():
        scores[token] = logits[token] + left @ selector.successor_codebook[token]
    return scores


@torch.no_grad()
def block_says(net, text: list[int], count: int) -> list[int]:
    drafted: list[int] = []
    for state in block_hidden(net, text, count):
        logits, last = net.draft_logits(state), [*text, *drafted][-1]
        if net.shape.candidates:
            logits = selected(net.candidate_selector, logits, last, state)
        elif net.shape.rank:
            logits = logits + net.markov_head(torch.tensor(last), state)
        best = int(logits.argmax())
        drafted.append(int(net.draft_ids[best]) if net.shape.draft_vocab else best)
    return drafted


@torch.no_grad()
def medusa_says(net, text: list[int], count: int) -> list[int]:
    return [int(head(states(text, (2,))[-1]).argmax(-1)) for head in net][:count]


@torch.no_grad()
def parallel_says(net, text: list[int], count: int) -> list[int]:
    """With a mask, here V - 1, for every token after the first that is not known."""
    read = torch.tensor([[*text, *[V - 1] * (count - 1)]])
    return net(read, use_cache=False).logits[0, -count:].argmax(-1).tolist()


@torch.no_grad()
def law_after(kind: str, drafter, text: list[int], path: list[int]) -> torch.Tensor:
    """Log-probabilities [V] of the drafter after a path, without any cache."""
    if kind == "medusa":
        return drafter.heads[len(path)](states(text, (2,))[-1]).log_softmax(-1)
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
