"""The check in every run must itself be able to fail, and must not cry wolf."""

import copy

import pytest
import torch
from conftest import tiny_llama

from specexp.drafters.model import DraftModel
from specexp.drafters.ngram import NGram
from specexp.engine import Engine
from specexp.measure import exactness
from specexp.measure.exactness import Reference, certify, compare, near_winners
from specexp.models.int8 import quantise
from specexp.models.lm import LM
from specexp.models.load import of_module
from specexp.policy import Fixed
from specexp.rules import Match, Reject
from specexp.sampling import Sampling
from specexp.tree import Tree

PROMPTS = [[1, 2, 3, 4], [5, 6], [7, 8, 9, 1, 2, 3, 7, 8]]


def engine(temperature=0.0, dtype=torch.float32, drafter="model", **sampling) -> Engine:
    law = Sampling(temperature, **sampling)
    target = of_module(tiny_llama(0).to(dtype), "target")
    draft = DraftModel(of_module(tiny_llama(1, layers=1).to(dtype), "draft"), law)
    chosen = draft if drafter == "model" else NGram()
    return Engine(target, chosen, Fixed(Tree.chain(4)), law, Reject(), seed=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_engine_output_is_exact(dtype, temperature, drafter):
    exact = certify(engine(temperature, dtype, drafter), PROMPTS, 24)
    assert exact.bugs == 0
    assert exact.metrics["exact/pass"] == 1
    if dtype != torch.bfloat16:
        assert exact.ties == 0
        assert exact.tokens == 24 * 3


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_certify_says_when_match_replaces_the_rule(temperature):
    line = str(certify(engine(temperature), PROMPTS, 4))
    assert ("Match in place of reject" in line) == (temperature > 0)


def test_top_k_and_top_p_are_exact():
    assert certify(engine(0.9, top_k=7, top_p=0.8), PROMPTS, 24).bugs == 0


class AcceptAll(Match):
    """The planted bug: every guess is kept, whatever the target says."""

    def __call__(self, draft, p, rng):
        path, n = draft.nodes.accepted(torch.ones_like(draft.tokens, dtype=torch.bool))
        last = p.gather(1, n[:, None, None].expand(-1, 1, p.shape[-1]))[:, 0]
        return draft.judged(path, n, last.argmax(-1))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rule_that_accepts_everything_is_a_bug(monkeypatch, temperature):
    broken = engine(temperature)
    if temperature:
        monkeypatch.setattr("specexp.measure.exactness.Match", AcceptAll)
    else:
        broken.rule = AcceptAll()  # greedy output is made by the engine's own rule
    exact = certify(broken, PROMPTS, 24)
    assert exact.bugs == 3
    assert exact.metrics["exact/pass"] == 0
    assert "bugs" in str(exact)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_kv_cache_off_by_one_is_a_bug(monkeypatch, temperature):
    broken, verify = engine(temperature), LM.verify  # loading would refuse such a module

    def shifted(self, seqs, draft, taps=()):
        if draft.tokens.shape[1] == 1:
            return verify(self, seqs, draft, taps)
        moved = copy.copy(seqs)
        moved.length = seqs.length + 1
        return verify(self, moved, draft, taps)

    monkeypatch.setattr(LM, "verify", shifted)
    assert certify(broken, PROMPTS, 24).bugs > 0


def test_row_that_stops_early_is_a_bug(monkeypatch):
    whole = Engine.generate

    def cut(self, prompts, max_new_tokens, streams=None):
        output = whole(self, prompts, max_new_tokens, streams)
        if len(self.policy.tree) > 1:
            output.tokens[1] = output.tokens[1][:-1]
        return output

    monkeypatch.setattr(Engine, "generate", cut)
    exact = certify(engine(), PROMPTS, 12)
    assert [d.kind for d in exact.divergences] == ["bug"]
    assert exact.divergences[0].row == 1


def test_near_tie_is_a_tie_and_clear_lead_is_not():
    checked = engine()
    head = checked.target.module.lm_head.weight
    text, reference = PROMPTS[0], Reference(checked.target)
    logits = checked.target.module(torch.tensor([text])).logits[0, -1]
    best = int(logits.argmax())
    other = (best + 1) % 32
    assert near_winners(checked, text, 0, reference) == {best}
    head.data[other] = head.data[best] * (1 + 1e-6)
    assert near_winners(checked, text, 0, reference) == {best, other}
    head.data[other] = head.data[best] * 0.9
    assert near_winners(checked, text, 0, reference) == {best}


@pytest.mark.parametrize("free", [1 << 40, 0])
def test_float32_copy_is_made_once(monkeypatch, free):
    checked = engine(dtype=torch.bfloat16)
    plain = checked.plain().generate(PROMPTS, 8).tokens
    odd = [[*row[:3], (row[3] + 1) % 32, *row[4:]] for row in plain]
    copied, deepcopy = [], copy.deepcopy
    monkeypatch.setattr(exactness, "free_memory", lambda device: free)
    monkeypatch.setattr(
        exactness.copy, "deepcopy", lambda *a: copied.append(deepcopy(*a)) or copied[-1]
    )
    assert compare(checked, PROMPTS, plain, 8, range(3)).divergences == []
    assert copied == []
    assert len(compare(checked, PROMPTS, odd, 8, range(3)).divergences) == 3
    [module] = [m for m in copied if isinstance(m, torch.nn.Module)]
    weights, before = module.state_dict(), checked.target.module.state_dict()
    assert all(w.dtype == torch.float32 for w in weights.values())
    assert all(torch.equal(w, before[name].float()) for name, w in weights.items())
    assert checked.target.module.lm_head.weight.dtype == torch.bfloat16


def test_float32_copy_keeps_tied_weights():
    target = of_module(tiny_llama(0, tie_word_embeddings=True).to(torch.bfloat16), "target")
    whole = copy.deepcopy(target.module).float()
    reference = Reference(target)
    wanted = whole(torch.tensor([PROMPTS[0]])).logits[0, -1, :32]
    assert torch.equal(reference.logits(PROMPTS[0]), wanted)
    copied = reference._module
    assert copied.lm_head.weight is copied.model.embed_tokens.weight


@pytest.mark.torchao
def test_reference_of_quantised_bfloat16_weights():
    module = tiny_llama(0).to(torch.bfloat16).eval()
    quantise(module, "cpu")
    logits = Reference(of_module(module, "target")).logits(PROMPTS[0])
    assert logits.dtype == torch.float32
    assert torch.isfinite(logits).all()
