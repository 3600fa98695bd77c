"""A draft of the target's own layers: which ones, what it learns, and that it can be used."""

import copy
import json
import shutil

import pytest
import torch
from conftest import tiny_llama
from transformers import AutoModelForCausalLM

import specexp
from specexp.errors import UserError
from specexp.zoo import drafts, shelf, train
from specexp.zoo.recipes import Course, Phase

TEXT = "def mean(values): return sum(values) / len(values)\n"


@pytest.fixture(scope="module")
def folder(tiny_folders, tmp_path_factory):
    return shutil.copytree(tiny_folders[0], tmp_path_factory.mktemp("models") / "mine")


def test_first_and_last_layers_are_kept():
    assert drafts.kept_layers(30, 4) == [0, 10, 19, 29]
    assert drafts.kept_layers(3, 2) == [0, 2]
    assert drafts.kept_layers(12, 1) == [0]
    for layers in (0, 3):
        with pytest.raises(UserError, match="3 layers keeps 1 to 2"):
            drafts.kept_layers(3, layers)


@torch.no_grad()
def test_cut_computes_what_the_target_does_without_the_other_layers():
    target = tiny_llama(0, 3).eval()
    draft = drafts.cut(target, 2).eval()
    whole = copy.deepcopy(target)
    del whole.model.layers[1]
    tokens = torch.arange(1, 9)[None]
    found, wanted = (m(tokens, use_cache=False).logits for m in (draft, whole))
    assert torch.equal(found, wanted)
    trained = {name for name, p in draft.named_parameters() if p.requires_grad}
    assert trained == {n for n, _ in draft.named_parameters() if "layers" in n or "norm" in n}


def test_steps_that_fit_are_counted_by_whole_steps_of_a_copy(tmp_path, monkeypatch):
    """The first takes longer; that of the optimizers is part of each."""
    target, clock, took = tiny_llama(0, 3).eval(), [0.0], [9.0, 2.0, 2.0, 3.0]
    draft, file = drafts.cut(target, 2), tmp_path / "answers.pt"
    before = copy.deepcopy(draft.state_dict())
    drafts.save(file, {})

    def learn(batch, model, *rest):
        assert model is not draft
        clock[0] += took.pop(0)
        return train.learn(batch, model, *rest)

    monkeypatch.setattr(drafts, "learn", learn)
    monkeypatch.setattr(drafts.time, "perf_counter", lambda: clock[0])
    for _ in range(2):
        course = Course((Phase(1, 1, 8),))
        assert drafts._steps(target, draft, torch.arange(9)[None], course, 100, file) == 50
    assert all(torch.equal(x, before[name]) for name, x in draft.state_dict().items())


def test_draft_is_trained_on_answers_and_drafts(folder, store, tmp_path, monkeypatch):
    """Killed in the middle, it goes on there; and another time finds all that was done. It drafts
    frequent tokens alone, and is an ordinary model to others."""
    monkeypatch.setattr(drafts, "LENGTH", 32)
    monkeypatch.setattr(drafts, "WORDS", 200)
    pairing = specexp.load(str(folder), "plain", temperature=0.8)
    prompts = pairing.encode([TEXT[i:] for i in range(24)])

    def trained():
        return drafts.train(pairing.engine, pairing.tokenizer, "mine", prompts, 2, 1e-3,
                            tmp_path / "out", source="24 lines")  # fmt: skip

    steps = []

    def killed(file, state):
        drafts.save(file, state)
        steps.append(len(state["losses"]))
        raise KeyboardInterrupt

    with monkeypatch.context() as first:
        first.setattr("specexp.zoo.train.save", killed)
        with pytest.raises(KeyboardInterrupt):
            trained()
    assert 0 < steps[0] < drafts.FEWEST
    made = trained()
    facts = json.loads((made / "zoo.json").read_text())
    assert (made.name, facts["role"], facts["target"]) == ("mine-draft-2", "draft", "mine")
    assert facts["layers"] == 2
    assert 0 <= facts["held_out"]["answers"]["overlap"] <= 1
    answers = facts["trained"]["answers"]
    assert answers["answered"] in (16, 24)
    assert answers["source"] == "24 lines"
    config = json.loads((made / "config.json").read_text())
    assert (len(config["draft_ids"]), config["vocab_size"]) == (200, len(pairing.tokenizer))
    module = AutoModelForCausalLM.from_pretrained(made)
    assert module.lm_head.weight.shape[0] == len(pairing.tokenizer)
    loss = json.loads((tmp_path / "out/mine-draft-2/zoo.json").read_text())["trained"]["courses"]
    monkeypatch.setattr(shelf, "models", lambda _=None, own=shelf.models: own(tmp_path / "out"))
    fast = specexp.load(str(folder), gamma=2)
    assert fast.drafter == "mine-draft-2"
    plain = specexp.load(str(folder), "plain")
    assert len(fast.engine.drafter.lm.module.lm_head.weight) == 200
    assert fast.generate(TEXT, 16).tokens == plain.generate(TEXT, 16).tokens
    monkeypatch.setattr(pairing.engine, "generate", None)  # nothing is left to write
    trained()
    assert json.loads((made / "zoo.json").read_text())["trained"]["courses"] == loss


def test_frequent_tokens_come_first_and_then_the_low(monkeypatch):
    monkeypatch.setattr(drafts, "WORDS", 4)
    documents = [torch.tensor([7, 9, 7]).numpy(), torch.tensor([9, 5, 9]).numpy()]
    assert drafts.frequent(documents, 12) == [0, 5, 7, 9]
    assert drafts.frequent(documents, 4) == []


@pytest.mark.parametrize(
    ("device", "has", "mixed"),
    [("cpu", {}, False), ("cpu", {"avx512_f": True, "avx512_bf16": False}, False),
     ("cpu", {"avx512_bf16": True}, True), ("cuda", {}, True)],
)  # fmt: skip
def test_products_are_in_16_bits_only_where_there_is_an_instruction(
    device, has, mixed, monkeypatch
):
    """Without one, a step of a draft of 135 million parameters took minutes."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    monkeypatch.setattr(torch, "autocast", lambda *args: args)
    assert train.mixed(device) == (device, torch.bfloat16, mixed)


def test_training_brings_the_draft_nearer(tmp_path):
    target = tiny_llama(0, 3).eval()
    draft = drafts.cut(target, 2)
    noise = torch.randint(1, 11, (4000,), generator=torch.Generator().manual_seed(0)).numpy()
    before = drafts.agreement(target, draft, [noise[:400]])
    loss = drafts.loss_of(target, draft)
    course = drafts.Course((drafts.Phase(60, 8, 32),), muon_lr=0.005, adam_lr=1e-3)
    documents = {"answers": [noise]}
    losses = drafts.fit("near", [course], documents, tmp_path, draft, loss, compiled=False)
    after = drafts.agreement(target, draft, [noise[:400]])
    assert losses[-1] < losses[0]
    assert after["overlap"] > before["overlap"]


@pytest.mark.parametrize("prompts", [[[1]], [[1], [2]]])
def test_too_few_answers_are_one_line(folder, prompts, store):
    pairing = specexp.load(str(folder), "plain", temperature=0.8)
    with pytest.raises(UserError, match="too few to learn from: raise --minutes") as e:
        drafts.train(pairing.engine, pairing.tokenizer, "mine", prompts, 2, 1e-4)
    assert "\n" not in str(e.value)


def test_equal_prompts_are_answered_with_different_noise(folder, tmp_path):
    pairing = specexp.load(str(folder), "plain", temperature=2.0)
    prompts = [[1, 2, 3]] * (2 * drafts.BATCH)
    texts = drafts.answered(pairing.engine, prompts, 1e9, tmp_path / "answers.pt")
    assert len({text.tobytes() for text in texts}) == len(prompts)
