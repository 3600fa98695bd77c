"""Tiny real models, a drafter of every kind over them, and engines: what tests of rounds share."""

import copy
import functools
from dataclasses import replace
from types import SimpleNamespace

import torch
from conftest import CONTEXT, tiny_llama
from support.hybrids import hybrid
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_layers import MtpModel

from specexp.drafters import mtp
from specexp.drafters.crossed import Crossed, TokenMap
from specexp.drafters.dflash import BlockDrafter
from specexp.drafters.eagle import EagleLayer, ParallelEagle
from specexp.drafters.early_exit import EarlyExit
from specexp.drafters.lookup import Lookup
from specexp.drafters.medusa import MedusaHeads
from specexp.drafters.model import DraftModel, ParallelModel
from specexp.drafters.ngram import NGram
from specexp.drafters.plain import Plain
from specexp.drafters.planted import Planted
from specexp.drafters.recycle import Recycle
from specexp.drafters.suffix import Suffix
from specexp.engine import Engine
from specexp.models import generation
from specexp.models.heads import block
from specexp.models.heads.eagle import Eagle, EagleShape, layer_config
from specexp.models.heads.layouts import BLOCKS, EAGLE3
from specexp.models.heads.medusa import Medusa
from specexp.models.lm import LM
from specexp.models.load import of_module
from specexp.policy import Fixed, Plan
from specexp.recording import reaches_host
from specexp.rules import Block, Match, Reject
from specexp.sampling import Sampling
from specexp.tree import Tree

V, NEW = 32, 18
TREES = {
    "empty": Tree.chain(0),
    "chain": Tree.chain(4),
    "branching": Tree.branching(2, 2),
    "irregular": Tree((-1, 0, 0, 0, 1, 1, 3, 4)),
    "grown": Tree.grown(9, 3),
}
PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 1, 2], [7, 7, 7], [9, 8, 1, 9, 8, 2, 9, 8], [30, 31]]
RULES = {"match": Match(), "reject": Reject(), "block": Block()}
SHAPES = [(r, t) for r in RULES for t in TREES if r != "block" or TREES[t].is_chain]
DRAFTERS = (
    "null", "ngram", "model", "chosen", "self", "parallel", "early_exit", "medusa", "eagle",
    "eagle3", "peagle", "mtp", "dflash", "dflash2", "dspark", "crossed", "planted", "suffix",
    "recycle", "lookup", "lookup_eagle3",
)  # fmt: skip


def llama():
    return tiny_llama(0)


def qwen3():
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=8))


def gemma():
    return GemmaForCausalLM(GemmaConfig(**SHAPE, num_key_value_heads=1, head_dim=8))


def gemma3():
    kinds = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**SHAPE, num_key_value_heads=1, head_dim=8, sliding_window=5,
                         layer_types=kinds, tie_word_embeddings=False)
    )  # fmt: skip


def gpt2():
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT,
                   initializer_range=0.4, bos_token_id=0, eos_token_id=0)
    )  # fmt: skip


def neox():
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE))


def opt():
    return OPTForCausalLM(
        OPTConfig(vocab_size=V, hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, init_std=0.4,
                  num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=CONTEXT)
    )  # fmt: skip


SHAPE = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": CONTEXT, "initializer_range": 0.4,
}  # fmt: skip
FAMILIES = {f.__name__: f for f in (llama, qwen3, gemma, gemma3, gpt2, neox, opt)}


@functools.cache
def module(family: str = "llama", dtype: torch.dtype = torch.float64, device: str = "cpu"):
    torch.manual_seed(0)
    made = FAMILIES[family]() if family in FAMILIES else hybrid(family)
    return made.to(device, dtype).eval()


@functools.cache
def draft_module(dtype: torch.dtype = torch.float64):
    """The target's own first layer: right often, wrong often."""
    whole = copy.deepcopy(module("llama", dtype))
    whole.model.layers = whole.model.layers[:1]
    whole.config = copy.deepcopy(whole.config)
    whole.config.num_hidden_layers = 1
    return whole


def drafter(kind: str, target: LM, law: Sampling, seed: int = 0):
    if kind == "null":
        return Plain()
    if kind == "ngram":
        return NGram(2)
    if kind == "suffix":
        return Suffix(V, 8)
    if kind == "recycle":
        return Recycle(target, 4)
    if kind.startswith("lookup"):
        other = drafter(kind.removeprefix("lookup_") if "_" in kind else "model", target, law)
        return Lookup(Suffix(V, 8), other, 2)
    same = target.apart("itself")
    if kind == "self":
        return DraftModel(same, law)
    if kind == "early_exit":
        return EarlyExit(target, 1, law)
    classes = {"medusa": MedusaHeads, "peagle": ParallelEagle} | dict.fromkeys(BLOCKS, BlockDrafter)
    if kind in ("medusa", "eagle", *EAGLE3, "mtp", *BLOCKS):
        made = heads(kind, target.dtype, target.module)
        return classes.get(kind, EagleLayer)(made, target, law)
    draft = of_module(copy.deepcopy(draft_module(target.dtype)).to(target.device), "draft")
    if kind == "crossed":
        return Crossed(draft, TokenMap(Alphabet(0), Alphabet(5), V), law)
    if kind == "parallel":
        return ParallelModel(draft, law, V - 1)
    model = DraftModel(draft, Sampling() if kind == "chosen" else law)
    return Planted(0.7, target, model, law, seed, 4) if kind == "planted" else model


class Alphabet:
    """A tokenizer of V letters, shifted; letters beyond some are spelt in two pieces."""

    eos_token_id = 0

    def __init__(self, shift: int) -> None:
        self.shift = shift

    def get_vocab(self) -> dict[str, int]:
        whole = V if not self.shift else V - 6  # the draft lacks six letters
        return {chr(65 + i): (i + self.shift) % V for i in range(whole)}

    def convert_ids_to_tokens(self, ids):
        back = {i: letter for letter, i in self.get_vocab().items()}
        return [back.get(i) for i in ids]

    def decode(self, ids, **_):
        return "".join(self.convert_ids_to_tokens(ids))

    def __call__(self, text, **_):
        vocab = self.get_vocab()
        pieces = [[vocab[c]] if c in vocab else [1, 2] for c in text]
        return SimpleNamespace(input_ids=[i for piece in pieces for i in piece])


HEAD = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


@functools.cache
def heads(kind: str, dtype: torch.dtype = torch.float64, target=None):
    """Of random weights, except that Medusa's begin as copies of the target's own head."""
    target = target or module("llama", dtype)
    torch.manual_seed(1)
    if kind == "medusa":
        made = Medusa(4, 1, 32, V)
        unit = torch.eye(32, dtype=dtype, device=target.device)
        for last in made.readouts:
            last.data.copy_(target.lm_head(unit).T)  # its weights may be of 8 bits
    elif kind in BLOCKS:
        layers = block.layers_config(HEAD | {"head_dim": 8, "num_hidden_layers": 2})
        shape = block.BlockShape(kind, layers, 6, V - 1, (0, 2), ((0, False), (0, False)))
        if kind == "dspark":
            spans = (0, False), (5, True)
            shape = replace(shape, from_root=True, draft_vocab=V - 8, rank=4, gated=True,
                            spans=spans)  # fmt: skip
        if kind == "dflash2":
            shape = replace(shape, rank=4, candidates=5, kernel=3, group=4)
        made = block.Block(shape, target.get_input_embeddings(), target.get_output_embeddings())
        if kind == "dspark":
            made.d2t.fill_(3)
            torch.nn.init.normal_(made.markov_head.markov_w2.weight)
        if kind == "dflash2":
            for name, weight in made.named_parameters():
                if "conv" in name or "selector" in name:
                    torch.nn.init.normal_(weight, std=0.5)
    elif kind == "mtp":
        says = copy.copy(target)
        says.config = copy.deepcopy(target.config)
        says.config.num_mtp_layers = 1
        made = mtp.Mtp(MtpModel(mtp.named(says), 1), (2,))
    else:
        layer = layer_config(HEAD, 1 + (kind == "peagle"))
        draft = (V - 8, (0, 0, 1)) if kind in EAGLE3 else (0, (2,))
        shape = EagleShape(kind, layer, *draft, mask=V - 1)
        made = Eagle(shape, target.get_input_embeddings(), target.get_output_embeddings())
        if kind in EAGLE3:
            made.d2t.fill_(5 if kind == "peagle" else 3)
        if kind == "peagle":
            torch.nn.init.normal_(made.mask_hidden)
    return made.to(target.device, dtype).eval().requires_grad_(False)


def engine(kind="model", tree="chain", rule="reject", family="llama", temperature=0.0,
           dtype=torch.float64, seed=0, eos=(), device="cpu", vocab=None) -> Engine:  # fmt: skip
    law = Sampling(temperature)
    target = of_module(module(family, dtype, device), "target", vocab)
    shape = TREES[tree] if isinstance(tree, str) else tree
    drafts = drafter(kind, target, law, seed)
    return Engine(target, drafts, Fixed(shape), law, RULES[rule], seed, eos)


def processed(made: Engine, **config: object) -> Engine:
    """An engine whose target's generation config says this."""
    target, said = made.target, GenerationConfig(eos_token_id=0, **config)
    process = generation.processors(said, "tiny", target.vocab, target.device)
    return Engine.of(made, target=target.apart(process=process))


class InTurn:
    """These trees in turn."""

    def __init__(self, *trees):
        self.trees, self.round, self.learned = trees, -1, []
        self.widest = max(tree.room for tree in trees)

    def choose(self, load):
        self.round += 1
        return Plan(self.trees[self.round % len(self.trees)])

    def learn(self, load, plan, steps, seconds):
        self.learned += [(plan.tree.depth, step) for step in steps]


class Even(Sampling):
    """Even tokens only."""

    def law(self, logits):
        odd = torch.arange(logits.shape[-1]) % 2 == 1
        return super().law(logits.masked_fill(odd, -torch.inf))


@torch.no_grad()
def slowly(net, prompt: list[int], count: int) -> list[int]:
    """Greedy text by the unmodified model, the whole text every time, no cache."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(net(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]


@functools.cache
def expected(family: str, count: int = NEW) -> list[list[int]]:
    return [slowly(module(family), p, count) for p in PROMPTS]


class NoHostReads(TorchDispatchMode):
    """Refuses whatever reaches the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not reaches_host(func, args), f"{func} inside a round"
        return func(*args, **(kwargs or {}))
