"""Trains Medusa, EAGLE and block heads for a target, on the target's own distribution.

Every batch passes through the target first, without gradients, for its hidden states and its
distribution p. The heads learn p (soft cross-entropy), not the text. EAGLE is trained on its own
output too: pass s of the unrolled chain reads the features made in pass s - 1 and attends to what
it would see while drafting (training-time test; Li et al. 2025, EAGLE-3, section 3.2), which makes
the feature loss of EAGLE-1 unnecessary.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from specexp import fitting
from specexp.errors import UserError
from specexp.models.heads.block import Block, BlockShape, layers_config
from specexp.models.heads.eagle import LAYER, Eagle, EagleShape, layer_config
from specexp.models.heads.layouts import BLOCKS, default_taps
from specexp.models.heads.medusa import Medusa
from specexp.models.heads.weights import save
from specexp.models.load import load, read_tokenizer
from specexp.zoo import files, shelf, train
from specexp.zoo.recipes import END, HEADS, HeadRecipe, insist_on_heads
from specexp.zoo.rows import Documents, Texts, encode, read, windows

# passes of EAGLE in training, each on the output of the one before (training-time test, Li et al.
# 2025, EAGLE-3, section 3.2)
UNROLL = 3
BLOCK = 8  # tokens of a block: the root and seven drafted ones
DECAY = 0.8  # weight of each further position, as in Medusa (Cai et al. 2024, section 2.2.1)
Predictions = Callable[[Tensor], Iterator[tuple[Tensor, ...]]]
"""From a batch [B, T + 1], for each drafted position: logits of the heads and p, [B, n, V] each,
and other logits that are to follow p, if there are any."""


Heads = Medusa | Eagle | Block


def make(recipe: HeadRecipe, target: PreTrainedModel, counts: Tensor, end: int = END) -> Heads:
    """Untrained heads. counts [V]: how often each token occurs in the training text; the most
    frequent ones are the draft vocabulary of EAGLE-3 and of blocks. end: the token that masks of
    blocks are."""
    config = target.config.get_text_config()
    torch.manual_seed(recipe.seed)
    readout = target.get_output_embeddings()
    if recipe.kind == "medusa":
        medusa = Medusa(recipe.heads, recipe.layers, config.hidden_size, config.vocab_size)
        for last in medusa.readouts:
            last.data.copy_(readout.weight)
        return medusa.to(target.device)
    embed = target.get_input_embeddings()
    net: Eagle | Block
    if recipe.kind in BLOCKS:
        net = Block(block_shape(recipe, config, end), embed, readout)
    else:
        net = Eagle(eagle_shape(recipe, config), embed, readout)
    net = net.to(target.device)
    if vocab := len(getattr(net, "d2t", ())):
        ids = counts.topk(vocab).indices.sort().values.to(target.device)
        net.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        net.lm_head.weight.data.copy_(readout.weight[ids])
    return net


def eagle_shape(recipe: HeadRecipe, config: Any) -> EagleShape:
    """The shape of an EAGLE layer with the same attention as the target's layers."""
    L, vocab = config.num_hidden_layers, config.vocab_size
    layer = layer_config(_settings(recipe, config))
    if recipe.kind == "eagle3":
        return EagleShape("eagle3", layer, min(recipe.draft_vocab, vocab), default_taps(L))
    return EagleShape(recipe.kind, layer, 0, (L,))


def block_shape(recipe: HeadRecipe, config: Any, end: int) -> BlockShape:
    """The shape of a DFlash block with the same attention as the target's layers."""
    layers = layers_config(_settings(recipe, config) | {"num_hidden_layers": recipe.layers})
    taps, spans = default_taps(config.num_hidden_layers), ((0, False),) * recipe.layers
    vocab, kind = min(recipe.draft_vocab, config.vocab_size), recipe.kind
    return BlockShape(kind, layers, BLOCK, end, taps, spans, draft_vocab=vocab, **recipe.more)


def _settings(recipe: HeadRecipe, config: Any) -> dict[str, Any]:
    settings = {name: getattr(config, name, None) for name in LAYER if "rope" not in name}
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
    settings["head_dim"] = settings["head_dim"] or config.hidden_size // config.num_attention_heads
    return settings | {"intermediate_size": recipe.hidden, "rope_theta": theta}


def loss_of(predictions: Predictions, device: str) -> train.Loss:
    """Soft cross-entropy summed over drafted positions, position i with the weight DECAY**i.

    Tokens that cannot be drafted do not contribute."""

    def loss(batch: Tensor) -> Tensor:
        with train.mixed(device):
            parts = []
            for i, (first, p, *others) in enumerate(predictions(batch)):
                for logits in (first, *others):
                    log_q = logits.float().log_softmax(-1)
                    cross = (p * log_q).masked_fill(log_q.isneginf(), 0).sum(-1)
                    parts.append(-(DECAY**i) * cross.mean())
            return torch.stack(parts).sum()

    return loss


@torch.no_grad()
def accuracy(predictions: Predictions, rows: Tensor, device: str) -> list[float]:
    """For each drafted position, how often the most likely token is the target's.

    rows [B, T + 1]; where there is a draft vocabulary, the target's most likely token in it."""
    with train.mixed(device):
        same = (logits.argmax(-1) == p.argmax(-1) for logits, p, *_ in predictions(rows))
        return [float(hits.float().mean()) for hits in same]


def predictions_of(model: Heads, target: PreTrainedModel) -> Predictions:
    """The predictions of heads and their target; with a draft vocabulary, for its tokens alone."""

    @torch.no_grad()
    def target_sees(batch: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        out = target(batch[:, :-1], use_cache=False, output_hidden_states=True)
        return out.hidden_states, out.logits.float().softmax(-1)

    def medusa(batch: Tensor) -> Iterator[tuple[Tensor, ...]]:
        assert isinstance(model, Medusa)
        states, p = target_sees(batch)
        for ahead, head in enumerate(model, 1):
            yield head(states[-1][:, :-ahead]), p[:, ahead:]

    def eagle(batch: Tensor) -> Iterator[tuple[Tensor, ...]]:
        assert isinstance(model, Eagle)
        states, p = target_sees(batch)
        p = p[..., model.draft_ids] if model.shape.fused else p
        features = model.fuse(torch.cat([states[t][:, :-1] for t in model.shape.taps], -1))
        tokens, p = batch[:, 1:-1], p[:, 1:]
        position = torch.arange(tokens.shape[1], device=batch.device)[None]
        cache = DynamicCache()  # of all passes: keys and values are concatenated
        for number in range(UNROLL):
            mask = unrolled(tokens.shape[1], number, features)
            predicted = model.features(tokens, features, position, mask, cache)
            yield model.draft_logits(predicted[:, number:]), p[:, number:]
            features = predicted.roll(1, 1)

    def block(batch: Tensor) -> Iterator[tuple[Tensor, ...]]:
        assert isinstance(model, Block)
        states, p = target_sees(batch)
        p, K = p[..., model.draft_ids], model.shape.block
        features = model.fuse(torch.cat([states[t] for t in model.shape.taps], -1))
        B, T, E = features.shape
        roots = roots_of(T, K, batch.device)
        tokens = torch.full((B, len(roots), K), model.shape.mask, device=batch.device)
        tokens[..., 0] = batch[:, roots]
        at = (roots[:, None] + torch.arange(K, device=batch.device)).view(1, -1)
        cache = DynamicCache()
        model.remember(features, torch.arange(T, device=batch.device)[None], cache)
        masks = [blocks_apart(roots, K, T, features)] * len(model.layers)
        hidden = model.hidden(tokens.view(B, -1), at, masks, cache).view(B, -1, K, E)
        for place in range(1, K):
            state, before = hidden[:, :, place], roots + place - 1
            logits, token = model.draft_logits(state), batch[:, before]
            if model.shape.candidates:
                yield model.candidate_selector(logits, token, state), p[:, before], logits
            elif model.shape.rank:
                yield logits + model.markov_head(token, state), p[:, before]
            else:
                yield logits, p[:, before]

    return {Medusa: medusa, Eagle: eagle, Block: block}[type(model)]


def roots_of(T: int, K: int, device: torch.device) -> Tensor:
    """The roots of the blocks of K tokens that are trained on in T tokens: every K/2-th token that
    has one before it and K - 1 after it."""
    return torch.arange(1, T - K + 2, max(1, K // 2), device=device)


def blocks_apart(roots: Tensor, K: int, T: int, like: Tensor) -> Tensor:
    """Additive mask [1, 1, A * K, T + A * K], with the dtype of `like`: the tokens of a block see
    the text before its root, and each other."""
    root = roots.repeat_interleave(K)[:, None]
    text = torch.arange(T, device=like.device)
    visible = torch.cat([text < root, root == root[:, 0]], 1)
    mask = torch.zeros(visible.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill(~visible, torch.finfo(like.dtype).min)[None, None]


def unrolled(T: int, number: int, like: Tensor) -> Tensor:
    """Additive mask [1, 1, T, (number + 1) * T] of pass `number`, with the dtype of `like`.

    The draft token in slot t belongs to a chain that starts at slot t - number: it sees pass 0 up
    to that slot and, of each later pass r, its own ancestor in slot t - number + r."""
    left = torch.arange(T, device=like.device)[:, None] - number
    slot = torch.arange(T, device=like.device)
    visible = [slot <= left, *(slot == left + r for r in range(1, number + 1))]
    mask = torch.zeros(T, (number + 1) * T, dtype=like.dtype, device=like.device)
    return mask.masked_fill(~torch.cat(visible, 1), torch.finfo(like.dtype).min)[None, None]


def train_heads(
    kind: str, target: str | Path, out: Path | None = None, device: str = "cpu",
    quick: bool = False, text: Path | None = None,
    watch: Callable[[train.Curve], object] = lambda curve: None,
) -> Path:  # fmt: skip
    """Train heads of a kind for any target in Hugging Face format; returns the folder written.

    `text`: a training text, by default the zoo's, which only a checkout has; the target's
    continuations of parts of it are trained on as well. `watch(curve)` is called at every
    checkpoint with the loss and, per drafted position, the accuracy on held-out text, at this and
    at all earlier ones. `out`: by default `zoo/models` of the store. `quick`: a smoke test, whose
    heads are useless. A killed run resumes.

    Raises UserError for an unknown kind, target, device or text."""
    insist_on_heads(kind)
    last = Path(target).name
    if fitting.split(str(target))[1]:
        raise UserError(f"{last}: heads are trained on unquantised weights; leave out +int8")
    train.check_device(device)
    work = shelf.store() / "zoo"
    recipe = HEADS[kind].quick() if quick else HEADS[kind]
    tokenizer = read_tokenizer(target)
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer of {last} has no end of text, which training documents "
            "end with: set its eos_token"
        )
    model = load(target, last, "float32", device)
    learnt, held_out, corpus = _documents(text, tokenizer, quick)
    net = model.module
    documents = [d for name, part in learnt.items() if name != "echoes" for d in part]
    count = 8 if quick else 512
    learnt["continued"] = train.continued(model, documents, count, work, tokenizer.eos_token_id)
    counts = np.bincount(np.concatenate(documents), minlength=model.config.vocab_size)
    head = make(recipe, net, torch.from_numpy(counts), tokenizer.eos_token_id)
    predictions = predictions_of(head, net)
    rows = {
        name: torch.from_numpy(windows(part, 256)[:16].astype(np.int64)).to(device)
        for name, part in held_out.items()
    }

    def rates() -> dict[str, list[float]]:
        return {name: accuracy(predictions, part, device) for name, part in rows.items()}

    def look() -> dict[str, float]:
        mean = torch.tensor([*rates().values()]).mean(0).tolist()
        return {f"accuracy/at_{i}": rate for i, rate in enumerate(mean, 1)}

    name, compiled = f"{last}-{kind}", not quick and train.can_compile(device)
    losses = train.fit(name, recipe.courses, learnt, work, head, loss_of(predictions, device),
                       device, compiled, aim=(UNROLL, train.fingerprint(net)), look=look,
                       watch=watch)  # fmt: skip
    figures = {
        name: {f"at_{i}": round(rate, 4) for i, rate in enumerate(each, 1)}
        for name, each in rates().items()
    }
    folder = (out or work / ("quick" if quick else "models")) / name
    of = last if Path(target).is_dir() else str(target)
    facts = {
        "name": name, "role": kind, "target": last, "about": recipe.about,
        "parameters": sum(p.numel() for p in head.parameters()),
        "layers": recipe.heads if kind == "medusa" else recipe.layers,
        "width": model.config.hidden_size,
        "held_out": figures,
        "trained": train.trained_on(recipe.courses, losses, recipe.seed, corpus=corpus),
    }  # fmt: skip
    with files.whole(folder) as unfinished:
        save(unfinished, head.to(torch.bfloat16), of, net.config.architectures or ())
        (unfinished / "zoo.json").write_text(json.dumps(facts, indent=1) + "\n")
        if text is None:
            card = shelf.making("cards").card_of_heads(facts)
            (unfinished / "README.md").write_text(card)
    return folder


def _documents(
    text: Path | None, tokenizer: Any, quick: bool
) -> tuple[dict[str, Documents], dict[str, Documents], dict[str, Any]]:
    """Training and held-out documents by kind, and the facts about them for the card."""
    if text is None:
        corpus = shelf.making("corpus")
        texts: Texts = corpus.small() if quick else corpus.gather()
    else:
        texts = read(text)
    learnt, held_out = (
        {kind: encode(tokenizer, pieces) for kind, pieces in side.items()}
        for side in (texts.train, texts.held)
    )
    if not any(len(document) > train.GIVEN for kind in learnt.values() for document in kind):
        raise UserError(f"{text} is too short to learn from: give it a few thousand characters")
    return learnt, held_out, texts.facts
