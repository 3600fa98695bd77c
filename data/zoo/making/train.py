"""Trains the zoo's models from their recipes, one after another.

A draft model learns the target's whole distribution (soft cross-entropy, which is the forward KL
plus a constant; Hinton et al. 2015, section 2) on the corpus and on continuations that the target
generated. This file does not know what the text is (`corpus.py`) or how a step is done
(`specexp/zoo/train.py`).
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from making.cards import card, describe, measure
from making.corpus import gather, small
from making.recipes import RECIPES, Recipe, quick_version
from making.tokenizer import train_tokenizer, wrap
from specexp.errors import UserError
from specexp.models.load import of_module
from specexp.zoo import files, shelf
from specexp.zoo.recipes import END
from specexp.zoo.rows import Texts, encode
from specexp.zoo.train import Loss, can_compile, check_device, continued, fingerprint, fit


def train_zoo(
    only: list[str] | None = None,
    out: Path | None = None,
    work: Path | None = None,
    device: str = "cpu",
    quick: bool = False,
) -> list[Path]:
    """Train the zoo, or the models named in `only`; returns the folders written.

    `work`: folder of the checkpoints, by default `zoo/` of the store. `out`: folder of the models,
    by default `work / "models"`, so that the shipped models are not overwritten; a draft model
    needs its target there. `quick`: a smoke test of a minute on little text; its models are
    useless.

    Raises UserError for an unknown model, an unavailable device, or a target not trained yet.
    """
    work = work or shelf.store() / "zoo"
    out = out or work / ("quick" if quick else "models")
    recipes = _chosen(only)
    check_device(device)
    texts = small() if quick else gather()
    for recipe in recipes:
        _make(quick_version(recipe) if quick else recipe, texts, out, work, device, quick)
    return [out / recipe.name for recipe in recipes]


def _make(recipe: Recipe, texts: Texts, out: Path, work: Path, device: str, quick: bool) -> None:
    """Train one model and write its folder."""
    target = _load(out / recipe.teacher, device) if recipe.teacher else None
    tokenizer = _tokenizer(texts, recipe, out)
    train = {kind: encode(tokenizer, each) for kind, each in texts.train.items()}
    held = {kind: encode(tokenizer, each) for kind, each in texts.held.items()}
    if target is not None:
        given = [d for kind in texts.train if kind != "echoes" for d in train[kind]]
        train["continued"] = continued(of_module(target), given, 8 if quick else 512, work)
    model = recipe.build().to(device)
    if target is not None and target.config.hidden_size == recipe.width:
        model.model.embed_tokens.weight.data.copy_(target.model.embed_tokens.weight.data)
    compiled = not quick and can_compile(device)
    aim = recipe.exits, fingerprint(target) if target is not None else ""
    loss = loss_of(model, target, recipe.exits)
    losses = fit(recipe.name, recipe.courses, train, work, model, loss, device, compiled, aim=aim)
    shipped = model.to(torch.bfloat16)
    shipped.generation_config = GenerationConfig(
        bos_token_id=END, eos_token_id=END, pad_token_id=END
    )
    with files.whole(out / recipe.name) as partial:
        shipped.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        tokens = 2_048 if quick else 32_768
        figures = measure(shipped.float().to(device), held, target, tokens)
        facts = describe(recipe, shipped, figures, texts.facts, losses)
        (partial / "zoo.json").write_text(json.dumps(facts, indent=1) + "\n")
        (partial / "README.md").write_text(card(facts))


def _chosen(only: list[str] | None) -> list[Recipe]:
    names = [recipe.name for recipe in RECIPES]
    for name in only or []:
        if name not in names:
            raise UserError(f"no recipe for {name!r}: the zoo trains {', '.join(names)}")
    return [recipe for recipe in RECIPES if only is None or recipe.name in only]


def _load(folder: Path, device: str) -> LlamaForCausalLM:
    """A trained model in float32, frozen."""
    if not (folder / "model.safetensors").exists():
        raise UserError(
            f"no {folder.name} in {folder.parent}: train it first, or point --out at its folder"
        )
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(device).eval().requires_grad_(False)


def _tokenizer(texts: Texts, recipe: Recipe, out: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of the zoo's target in `out`; a new one for that target or without it."""
    target = next(r.name for r in RECIPES if r.role == "target")
    path = out / target / "tokenizer.json"
    if recipe.name != target and path.exists():
        return wrap(Tokenizer.from_file(str(path)))
    return train_tokenizer(
        text for kind, each in texts.train.items() if kind != "echoes" for text in each
    )


def loss_of(
    model: LlamaForCausalLM, teacher: LlamaForCausalLM | None, exits: tuple[int, ...] = ()
) -> Loss:
    """Cross-entropy per token of a batch [B, T + 1], against the text or a teacher's distribution.

    `exits`: layers whose hidden states must also predict the token through the model's own norm and
    head; the mean of their losses is added (LayerSkip, Elhoushi et al. 2024, section 4.1.2).
    """

    def logits(net: LlamaForCausalLM, ids: torch.Tensor) -> list[torch.Tensor]:
        out = net.model(input_ids=ids, use_cache=False, output_hidden_states=bool(exits))
        states = [out.last_hidden_state, *(net.model.norm(out.hidden_states[e]) for e in exits)]
        return [F.linear(x, net.lm_head.weight).flatten(0, 1).float() for x in states]  # [B * T, V]

    def answers(batch: torch.Tensor) -> torch.Tensor:
        if teacher is None:
            return batch[:, 1:].flatten()
        with torch.no_grad():
            return logits(teacher, batch[:, :-1])[0].softmax(-1)

    def loss(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(model.device.type, torch.bfloat16):
            right = answers(batch)
            last, *early = (F.cross_entropy(x, right) for x in logits(model, batch[:, :-1]))
            return last + sum(early) / len(early) if early else last

    return loss
