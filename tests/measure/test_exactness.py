"""The check in every run must itself be able to fail, and must not cry wolf."""

import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch
from conftest import one_in, tiny_llama
from support import architectures, tiny
from support.fake_cuda import ATTENTION, begun

from specexp.drafters.model import DraftModel
from specexp.drafters.ngram import NGram
from specexp.engine import Engine
from specexp.measure.exactness import Reference, certify, compare, draws, near_winners, reference
from specexp.measure.exactness.draws import Tally, Witness, sets_of
from specexp.models.int8 import quantise
from specexp.models.lm import LM
from specexp.models.load import of_module
from specexp.models.processors import NoRepeatNgram, Processors, RepetitionPenalty
from specexp.policy import Fixed
from specexp.rules import Match, Reject, Typical, follow, normalised
from specexp.sampling import ACCEPT, Sampling
from specexp.tree import Tree

PROMPTS = [[1, 2, 3, 4], [5, 6], [7, 8, 9, 1, 2, 3, 7, 8]]


def engine(temperature=0.0, dtype=torch.float32, drafter="model", **sampling) -> Engine:
    law = Sampling(temperature, **sampling)
    target = of_module(tiny_llama(0).to(dtype), "target")
    draft = DraftModel(of_module(tiny_llama(1, layers=1).to(dtype), "draft"), law)
    chosen = draft if drafter == "model" else NGram()
    return Engine(target, chosen, Fixed(Tree.chain(4)), law, Reject(), seed=3)


@pytest.mark.parametrize(
    ("drafter", "temperature", "dtype"),
    one_in(2, itertools.product(
        ["model", "ngram"], [0.0, 0.8], [torch.float32, torch.bfloat16, torch.float64]
    )),
)  # fmt: skip
def test_engine_output_is_exact(dtype, temperature, drafter):
    exact = certify(engine(temperature, dtype, drafter), PROMPTS, 24)
    assert exact.bugs == 0
    assert exact.metrics["exact/pass"] == 1
    if dtype != torch.bfloat16:
        assert exact.ties == 0
        assert exact.tokens == 24 * 3


def test_two_tokens_are_continued_and_checked_to_the_end_of_a_short_context():
    target = of_module(tiny_llama(0, max_position_embeddings=32), "target")
    exact = certify(Engine(target, NGram(), Fixed(Tree.chain(4))), [[1, 2]], 30)
    assert (exact.bugs, exact.tokens) == (0, 30)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_certify_says_when_match_replaces_the_rule(temperature):
    line = str(certify(engine(temperature), PROMPTS, 4))
    assert ("Match in place of reject" in line) == (temperature > 0)


def test_top_k_and_top_p_are_exact():
    assert certify(engine(0.9, top_k=7, top_p=0.8), PROMPTS, 24).bugs == 0


def test_cuts_at_min_p_are_exact():
    assert certify(engine(0.9, min_p=0.2), PROMPTS, 24).bugs == 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_near_winners_of_processed_logits_are_processed(temperature):
    checked = engine(temperature, torch.bfloat16)
    steps = {"penalty": RepetitionPenalty(1.4), "ngrams": NoRepeatNgram(2)}
    checked = Engine.of(checked, target=checked.target.apart(process=Processors(steps)))
    assert certify(checked, PROMPTS, 24).bugs == 0
    reference = Reference(checked.target)
    row = checked.plain().generate(PROMPTS[:1], 9).tokens[0]
    text = [*PROMPTS[0], *row, PROMPTS[0][0]]
    logits = reference.logits(text)
    assert logits[PROMPTS[0][1]] == -torch.inf, "its bigram is in the text"
    assert 0 < len(near_winners(checked, text, 0, reference)) < 16


class AcceptAll(Match):
    """The planted bug: every draft token is kept, whatever the target says."""

    def __call__(self, draft, p, rng):
        path, n = draft.nodes.accepted(torch.ones_like(draft.tokens, dtype=torch.bool))
        last = p.gather(1, n[:, None, None].expand(-1, 1, p.shape[-1]))[:, 0]
        return draft.judged(path, n, last.argmax(-1))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rule_that_accepts_everything_is_a_bug(monkeypatch, temperature):
    broken = engine(temperature)
    if temperature:
        monkeypatch.setattr("specexp.measure.exactness.verdict.Match", AcceptAll)
    else:
        broken.rule = AcceptAll()  # greedy output is made by the engine's own rule
    exact = certify(broken, PROMPTS, 24)
    assert [d.kind for d in exact.divergences] == ["bug"] * 3
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
    monkeypatch.setattr(reference, "free_memory", lambda device: free)
    monkeypatch.setattr(
        reference.copy, "deepcopy", lambda *a: copied.append(deepcopy(*a)) or copied[-1]
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
    assert torch.allclose(reference.logits(PROMPTS[0]), wanted, atol=1e-5)
    copied = reference._module
    assert copied.lm_head.weight is copied.model.embed_tokens.weight


@pytest.mark.torchao
def test_reference_of_quantised_bfloat16_weights():
    module = tiny_llama(0).to(torch.bfloat16).eval()
    quantise(module, "cpu")
    logits = Reference(of_module(module, "target")).logits(PROMPTS[0])
    assert logits.dtype == torch.float32
    assert torch.isfinite(logits).all()


# What ran: draws against q, the run's own rule, and the module without a cache ------------------

MANY = [[1 + i % 29, 2 + i % 7, 3 + i % 11] for i in range(24)]  # 24 rows x 40 tokens


class Misreported(DraftModel):
    """The planted bug: the q that it reports is sharper than what it drew from."""

    def propose(self, seqs, tree, rng):
        draft = super().propose(seqs, tree, rng)
        return replace(draft, q=normalised(draft.q**2, draft.q))


class Lucky(DraftModel):
    """The planted bug: it keeps a draft token, the first of a round, only if the draw was likely.
    That looks at the token's own luck."""

    def propose(self, seqs, tree, rng):
        draft = super().propose(seqs, tree, rng)
        tokens = torch.full_like(draft.tokens, -1)
        tokens[:, 0], first = draft.tokens[:, 0], draft.tokens[:, 1:2]
        tokens[:, 1:2] = torch.where(draft.q[:, 0].gather(1, first) > 0.05, first, -1)
        return replace(draft, tokens=tokens)


class Coupled(DraftModel):
    """The planted bug: true draws from q, by the noise with which the rule will accept them; those
    that the target likes least where anything is accepted."""

    target: LM

    def propose(self, seqs, tree, rng):
        draft = super().propose(seqs, tree, rng)
        p = self.target.module(seqs.tokens).logits[torch.arange(len(seqs.length)), seqs.length - 1]
        q, u = draft.q[:, 0], rng.uniform(draft.keys[:, :1], ACCEPT, torch.tensor([0]))[..., 0]
        order = (self.sampling.law(p) / q).argsort(-1)
        at = (q.gather(-1, order).cumsum(-1) < u).sum(-1, keepdim=True).clamp(max=q.shape[-1] - 1)
        tokens = torch.full_like(draft.tokens, -1)
        tokens[:, :2] = torch.cat([draft.tokens[:, :1], order.gather(1, at)], 1)
        return replace(draft, tokens=tokens)


class Uncorrected(Reject):
    """The planted bug: after a rejection it draws from p, not from what is left of p."""

    name = "uncorrected"

    def __call__(self, draft, p, rng):
        verdict = super().__call__(draft, p, rng)
        stop = verdict.path.gather(1, verdict.n[:, None])
        law = p.gather(1, stop[..., None].expand(-1, 1, p.shape[-1]))[:, 0]
        bonus = rng.uncoupled(law, draft.keys.gather(1, stop)[:, 0])
        return draft.judged(verdict.path, verdict.n, bonus)


class Late(Reject):
    """The planted bug: right until a draft token is accepted, then the root's p once more."""

    name = "late"

    def __call__(self, draft, p, rng):
        return super().__call__(draft, p[:, :1].expand_as(p), rng)


class Unreduced(Reject):
    """The planted bug: every sibling is tried against the p that the first one was."""

    name = "unreduced"

    def __call__(self, draft, p, rng):
        ok, at_parent = torch.zeros_like(draft.tokens, dtype=torch.bool), draft.nodes.parents
        x = draft.tokens.clamp(min=0)[..., None]
        for node in range(1, draft.tokens.shape[1]):
            parent = int(at_parent.flatten()[node])
            ratio = p[:, parent].gather(1, x[:, node]) / draft.q[:, parent].gather(1, x[:, node])
            ok[:, node] = rng.bernoulli(ratio[:, 0].clamp(max=1), draft.keys[:, parent], node)
        path, n = draft.nodes.accepted(ok)
        stop = path.gather(1, n[:, None])
        owed = normalised((p - draft.q).clamp(min=0), p)
        law = owed.gather(1, stop[..., None].expand(-1, 1, p.shape[-1]))[:, 0]
        return draft.judged(path, n, rng.uncoupled(law, draft.keys.gather(1, stop)[:, 0]))


class Favourite(Typical):
    """It calls itself exact, and its bonus is always right."""

    name, lossy = "favourite", False


def failed(broken, prompts=MANY, length=40) -> list[str]:
    """The draws that fail a verdict, which states what it can find."""
    exact = certify(broken, prompts, length)
    assert exact.metrics["exact/pass"] == 0
    assert 0 < exact.metrics["exact/detectable_tv"] < 0.13
    single = exact.metrics["exact/detectable_tv_row"]
    assert exact.metrics["exact/detectable_tv"] < single <= 1
    assert f"or {single:.2g} in a single row" in str(exact)
    assert f"detects a mean total variation of {exact.detectable:.2g}" in str(exact)
    return [check.what for check in exact.checks if not check.passed]


@pytest.mark.parametrize("shape", [Tree.chain(4), Tree.branching(2, 2)], ids=str)
def test_q_that_is_not_what_was_drawn_from_is_a_bug(shape):
    broken = engine(0.8)
    broken.policy = Fixed(shape)
    broken.drafter = Misreported(broken.drafter.lm, broken.sampling)
    assert "draft tokens" in failed(broken)


@pytest.mark.parametrize(("kind", "draw"), [(Lucky, "draft tokens"), (Coupled, "emitted tokens")])
def test_drafter_that_looks_at_its_luck_or_at_the_noise_of_the_rule_is_a_bug(kind, draw):
    broken = engine(0.8)
    broken.drafter = kind(broken.drafter.lm, broken.sampling)
    broken.drafter.target = broken.target
    assert failed(broken) == [draw]


def test_rule_that_does_not_reduce_p_for_a_sibling_is_a_bug():
    broken = engine(0.8)
    broken.policy, broken.rule = Fixed(Tree.branching(3)), Unreduced()
    assert "tokens of unreduced on fresh noise" in failed(broken)


class Trusting(Reject):
    """The planted bug: where the row of q is 0, what was chosen is as good as accepted."""

    name = "trusting"

    def __call__(self, draft, p, rng):
        following = draft.tokens.roll(-1, 1).clamp(min=0)[..., None]
        certain = torch.zeros_like(p).scatter_(-1, following, 1.0)
        return super().__call__(draft, torch.where(draft.q.any(-1, keepdim=True), p, certain), rng)


def test_rule_that_trusts_what_was_chosen_among_what_was_drawn_is_a_bug():
    broken = tiny.engine("lookup", "chain", "reject", temperature=0.9)
    broken.rule = Trusting()
    assert "tokens of trusting on fresh noise" in failed(broken, tiny.PROMPTS * 8)


class Lenient(Match):
    """The planted bug, at temperature 0: a draft token whose logit is near the best will do."""

    near = 0.5

    def __call__(self, draft, p, rng):
        child = draft.nodes.children[..., 0].expand_as(draft.tokens)
        x = torch.where(child >= 0, draft.tokens.gather(1, child.clamp(min=0)), -1)
        theirs = p.gather(-1, x.clamp(min=0)[..., None])[..., 0]
        near = (x >= 0) & (theirs >= p.amax(-1) - self.near)
        return follow(draft, torch.where(near, x, p.argmax(-1)))


class LastOfTies(Match):
    """The planted bug, at temperature 0: of tokens that are equally likely it takes the last."""

    def __call__(self, draft, p, rng):
        return follow(draft, p.shape[-1] - 1 - p.flip(-1).argmax(-1))


@pytest.mark.parametrize("rule", [Lenient(), LastOfTies()], ids=lambda rule: type(rule).__name__)
def test_greedy_rule_that_is_wrong_within_rounding_is_a_bug(rule):
    """Beside plain decoding it can be a near tie."""
    checked = engine(dtype=torch.bfloat16)
    head = checked.target.module.lm_head.weight
    head.data[16:] = head.data[:16] * (1.0 if isinstance(rule, LastOfTies) else 0.99)
    assert certify(checked, PROMPTS, 24).bugs == 0
    checked.rule = rule
    exact = certify(checked, PROMPTS, 24)
    assert exact.ties
    assert exact.bugs >= exact.unlikely > 0
    assert f"BUG: {exact.unlikely} of them are not the likeliest of their own round" in str(exact)


@pytest.mark.parametrize("rule", [Uncorrected(), Favourite()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_rule_that_is_not_exact_is_a_bug(rule, drafter):
    broken = engine(0.8, drafter=drafter)
    broken.rule = rule
    prompts = MANY if drafter == "model" else [[*p, *p, *p[:1]] for p in MANY]
    assert f"tokens of {rule.name} on fresh noise" in failed(broken, prompts)


def test_rule_that_is_wrong_after_its_first_token_is_a_bug():
    broken = engine(0.8)
    broken.rule = Late()
    assert "emitted tokens" in failed(broken)


class TopOfTheTail(Reject):
    """The planted bug: the likeliest of the unlikely tokens stands for all of them, which neither
    changes how many of the likely ones are drawn, nor how many of those that q has too often."""

    name = "top of the tail"

    def __call__(self, draft, p, rng):
        unlikely = ~sets_of(p, p > 0)[..., 1, :]
        top = torch.where(unlikely, p, -1.0).argmax(-1, keepdim=True)
        mass = (p * unlikely).sum(-1, keepdim=True)
        law = torch.where(unlikely, 0.0, p).scatter(-1, top, mass)
        return super().__call__(draft, torch.where(mass > 0, law, p), rng)


class EvenOnly(DraftModel):
    """The planted bug: a uniform q is reported, and even tokens alone are drawn."""

    def propose(self, seqs, tree, rng):
        draft, V = super().propose(seqs, tree, rng), self.lm.vocab
        drawn = torch.randint(V // 2, draft.tokens.shape, generator=self.generator) * 2
        drawn[:, 0] = draft.tokens[:, 0]
        return replace(draft, tokens=drawn, q=torch.full_like(draft.q, 1 / V))

    generator = torch.Generator().manual_seed(0)


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_fault_among_unlikely_tokens_alone_is_a_bug(drafter):
    broken = engine(0.8, drafter=drafter)
    broken.rule = TopOfTheTail()
    assert "tokens of top of the tail on fresh noise" in failed(broken)


def test_fault_among_equally_likely_tokens_is_a_bug():
    broken = engine(0.8)
    broken.drafter = EvenOnly(broken.drafter.lm, broken.sampling)
    assert failed(broken) == ["draft tokens"]


class AmissInOneRow(Reject):
    """The planted bug: in the last row of a batch it accepts everything."""

    name = "amiss in one row"

    def __call__(self, draft, p, rng):
        wrong, right = AcceptAll()(draft, p, rng), super().__call__(draft, p, rng)
        last = torch.arange(len(p)) == len(p) - 1
        parts = {
            name: torch.where(last.view(-1, *[1] * (part.ndim - 1)), part, getattr(right, name))
            for name, part in vars(wrong).items()
        }
        return replace(right, **parts)


def test_rule_that_is_wrong_in_one_row_of_many_is_a_bug():
    """Too little of all draws to show in their sum."""
    broken = engine(0.8)
    broken.rule = AmissInOneRow()
    exact = certify(broken, MANY, 40)
    amiss = [check for check in exact.checks if not check.passed]
    assert "tokens of amiss in one row on fresh noise" in [check.what for check in amiss]
    assert all(check.bias < check.detectable < check.in_row for check in amiss)
    in_row = max(check.in_row for check in exact.checks)
    assert f", or {in_row:.2g} in a single row, with one false alarm" in str(exact)


def test_token_of_probability_zero_is_a_bug():
    tally = Tally(1, torch.device("cpu"))
    p = torch.tensor([[[0.5, 0.5, 0.0]]])
    tally.add(torch.tensor([[2]]), p, sets_of(p, p > 0.4), torch.tensor([[True]]))
    assert not tally.check("", "").passed


class Warmer:
    """A network whose logits are off by a thousandth."""

    def __init__(self, whole):
        self.whole, self.by_length_up_to, self.parts = whole, 0, whole.parts

    def __call__(self, *args, **inputs):
        logits, hidden = self.whole(*args, **inputs)
        return None if logits is None else logits * 1.001, hidden


def test_logits_that_only_a_cache_gives_are_a_bug():
    """Plain and speculative decoding are wrong alike."""
    broken = engine()
    broken.target.net = Warmer(broken.target.net)
    exact = certify(broken, PROMPTS, 24)
    assert not exact.divergences
    assert exact.strays == exact.alone == exact.bugs == 48
    assert "logits of 48 tokens with the unmodified model's: 48 bugs" in str(exact)


def test_module_whose_forms_for_a_text_and_a_token_differ_has_two_texts(caplog):
    """Nemotron-H bounds time steps in one of them alone: no fault of drafts, which still show."""
    module = architectures.build("nemotron_h", torch.float32)
    target = of_module(module, "nemotron")
    made = Engine(target, NGram(2), Fixed(Tree.chain(4)), Sampling(0.0))
    prompts = architectures.prompts(3, 40)
    assert certify(made, prompts, 24).bugs == 0
    assert caplog.text.count("nemotron gives other logits with its own cache") == 1
    target.net = Warmer(target.net)
    assert certify(made, prompts, 24).strays > 0


SHAPES = [("match", "chain"), ("reject", "chain"), ("reject", "branching"), ("block", "chain")]
QUICK = {(kind, *SHAPES[i % 4]) for i, kind in enumerate(tiny.DRAFTERS) if i % 5 == 2}
EVERY = [(kind, *shape) for kind in tiny.DRAFTERS for shape in tiny.SHAPES]


@pytest.mark.parametrize(
    ("kind", "rule", "tree"),
    [c if c in QUICK else pytest.param(*c, marks=pytest.mark.slow) for c in EVERY],
)
def test_shipped_rules_on_shipped_drafters_follow_their_distributions(kind, rule, tree):
    checked = tiny.engine(kind, tree, rule, temperature=0.9)
    exact = certify(checked, tiny.PROMPTS * 2, 30)
    assert exact.bugs == 0, str(exact)
    drafts = tree != "empty" and kind != "null"
    drawn = drafts and checked.drafter.draws and tree != "grown"
    assert len(exact.checks) == 1 + drafts + drawn


@pytest.mark.parametrize(
    ("kind", "tree", "rule"),
    [("model", "branching", "reject"), ("model", "chain", "block"), ("ngram", "chain", "match")],
)
def test_counting_draws_leaves_them_on_a_gpu(monkeypatch, kind, tree, rule):
    monkeypatch.setenv("SPECEXP_NATIVE", "off")
    [attention, dtype] = next(iter(ATTENTION.items()))
    counted = tiny.engine(kind, tree, rule, temperature=0.9, dtype=dtype)
    witness = counted.clock = Witness(counted, len(tiny.PROMPTS), range(0))
    witness.generator = None  # there is none of a GPU here
    with begun(counted, tiny.PROMPTS, tiny.TREES[tree], attention) as seqs:
        counted.round(seqs, tiny.TREES[tree])
        tallies = [witness.drafted, witness.judged, witness.emitted]
        assert all(tally.sums.is_meta for tally in tallies)


def tallies(shift: float, n: int, count: int) -> list:
    """Tallies of n coins each of many biases, whose true probability is `shift` more."""
    torch.manual_seed(0)
    every = []
    for _ in range(count):
        p = 0.05 + 0.8 * torch.rand(n, 1).double()
        law = torch.cat([p, 1 - p], -1)
        tokens = (torch.rand(n).double() > p[:, 0] + shift).long()
        tally = Tally(1, law.device)
        for at in torch.arange(n).split(n // 10):
            sets, valid = sets_of(law, law == p)[None, at], tokens[None, at] >= 0
            tally.add(tokens[None, at], law[None, at], sets, valid)
        every.append(tally)
    return every


def test_false_alarms_are_as_rare_as_stated(monkeypatch):
    """At a level of 5 % for each of the two chosen sets, which here are the same or opposite; and
    for the learned one."""
    every = tallies(0.0, 300, 600)
    for bound in ("BOUND", "LATE"):
        with monkeypatch.context() as patch:
            patch.setattr(draws, bound, math.log(2 / 0.05))
            assert 0 < sum(not tally.check("", "").passed for tally in every) <= 0.05 * 600


def test_fault_of_the_stated_size_is_found():
    size = tallies(0.0, 600, 1)[0].check("", "").detectable
    assert size < 0.14
    assert sum(not t.check("", "").passed for t in tallies(size, 600, 200)) >= 0.93 * 200
