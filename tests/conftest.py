"""Tiny real models, folders of them, and a store: what the tests share."""

import importlib.util
import shutil

import pytest
import torch
from servers import initdb
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 128


def pytest_collection_modifyitems(config, items):
    """Tests that need a GPU, PostgreSQL or the package `speculators` exist only where there is one:
    deselected elsewhere, never skipped."""
    there = {
        "cuda": torch.cuda.is_available(),
        "postgres": bool(initdb()) and importlib.util.find_spec("psycopg2") is not None,
        "speculators": importlib.util.find_spec("speculators") is not None,
    }
    gone = [
        item
        for item in items
        if any(item.get_closest_marker(name) and not found for name, found in there.items())
    ]
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if item not in gone]


def tiny_llama(seed: int, layers: int = 2, vocab: int = 32, **config) -> LlamaForCausalLM:
    """Random weights, spread widely enough that greedy texts do not repeat one token."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": vocab, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT, "initializer_range": 0.4,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**shape | config))


def tiny_tokenizer(text: str) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    bpe.train_from_iterator(
        [text],
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=special[0], bos_token=special[0])


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory) -> tuple[str, str]:
    """A target and a draft on disk with one tokenizer: safetensors, as from a hub."""
    tokenizer = tiny_tokenizer("def mean(values): return sum(values) / len(values)\n" * 3)
    folders = []
    for name, seed, layers in (("target", 0, 3), ("draft", 1, 1)):
        folder = tmp_path_factory.mktemp("models") / name
        tiny_llama(seed, layers, vocab=len(tokenizer)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        folders.append(str(folder))
    return folders[0], folders[1]


@pytest.fixture(scope="session")
def migrated(tmp_path_factory):
    """A store whose database exists: creating one takes seconds, copying it does not."""
    from specexp.lab import track

    root = tmp_path_factory.mktemp("migrated")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECEXP_MLRUNS", str(root))
        track.initialise()
    return root


@pytest.fixture
def store(tmp_path, monkeypatch, migrated):
    """A fresh store of one test's own."""
    root = tmp_path / "mlruns"
    root.mkdir()
    shutil.copy(migrated / "mlflow.db", root / "mlflow.db")
    monkeypatch.setenv("SPECEXP_MLRUNS", str(root))
    return root
