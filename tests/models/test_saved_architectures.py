"""A few architectures as strangers have them: a saved folder, the command, its output, exit code.

Every other one is served from modules in memory (test_architectures.py).
"""

import json
import sys

import pytest
from conftest import also
from support import architectures
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from specexp.commands import app

SERVED = ["mistral", "gemma3_text", "bamba", "llama, yarn", "bart"]
SERVED += also("gpt_neox", "deepseek_v3", "gpt_neo")
REFUSED = ("deepseek_v4", "reformer")
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "image_size": 28,
          "num_attention_heads": 2, "patch_size": 14}  # fmt: skip
TEXTS = architectures.prompts(1, 266)


@pytest.fixture
def generated(tmp_path, monkeypatch, capsys):
    """generated(module) -> the folder it is saved in, and the command's exit code and lines."""

    def call(module):
        words = {f"w{i}": i for i in range(architectures.V)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
        module.save_pretrained(tmp_path)
        texts = [" ".join(f"w{i}" for i in text) for text in TEXTS]
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        options = {"target": tmp_path, "drafter": "ngram", "prompts": prompts, "dtype": "float32",
                   "device": "cpu", "max-new-tokens": architectures.NEW}  # fmt: skip
        words = [f"--{name}={value}" for name, value in options.items()]
        monkeypatch.setattr(sys, "argv", ["specexp", "generate", "--json", *words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            app.main()
        out, err = capsys.readouterr()
        return tmp_path, stopped.value.code or 0, out.splitlines(), err.splitlines()

    return call


@pytest.mark.parametrize("name", SERVED)
def test_command_writes_the_texts_of_transformers_for_a_folder(name, generated):
    folder, code, out, _ = generated(architectures.build(name).float())
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    assert code == 0
    assert [json.loads(line)["tokens"] for line in out] == [
        architectures.greedy(theirs, text, architectures.NEW) for text in TEXTS
    ]


@pytest.mark.parametrize("name", REFUSED)
def test_command_refuses_a_folder_in_one_line(name, generated):
    _, code, out, err = generated(architectures.build(name).float())
    assert (code, out) == (2, [])
    [line] = err
    assert line.startswith("error: ")


def test_composite_model_is_refused_in_one_line(generated):
    text = architectures.config("gemma3_text").to_dict()
    config = Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
    _, code, out, err = generated(Gemma3ForConditionalGeneration(config))
    assert (code, out) == (2, [])
    [line] = err
    assert line.endswith("is a Gemma3ForConditionalGeneration, not a causal LM; choose one that is")
