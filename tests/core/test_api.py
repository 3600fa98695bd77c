"""The door: ten names, names or objects for everything, and one line for what is wrong."""

import copy
import os
import re
import subprocess
import sys
import types
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama, tiny_tokenizer
from support.own import Alternate, Echo, Fade, Ones

import specexp
from specexp import drafters, fitting, objects
from specexp.drafters import Prepared
from specexp.drafters.model import DraftModel
from specexp.errors import UserError
from specexp.measure import one_pairing
from specexp.models.load import of_module
from specexp.policy import Fixed, Plan
from specexp.rules import Match, Reject
from specexp.sequences import Verdict
from specexp.serving.engine_rows import EngineRows
from specexp.serving.requests import Request
from specexp.serving.server import Server

TEXTS = ["def mean(values):", "return sum(values)"]
NAMES = "Drafter Engine Pairing Policy Rule Sampling Trace Tree load theory"


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer("def mean(values): return sum(values) / len(values)\n" * 3)


@pytest.fixture(scope="module")
def target(tokenizer):
    return tiny_llama(0, 3, vocab=len(tokenizer))


@pytest.fixture(scope="module")
def draft(tokenizer):
    return tiny_llama(1, 1, vocab=len(tokenizer))


@pytest.fixture
def load(target, tokenizer):
    """load(drafter, ...) for a target in memory."""

    def call(drafter, gamma=3, **more):
        return specexp.load(target, drafter, gamma, tokenizer=tokenizer, **more)

    return call


@pytest.fixture
def plugin(monkeypatch):
    """plugin(kind, name, "module:Object"): another package's entry point."""

    def call(kind: str, name: str, value: str) -> None:
        entry = EntryPoint(name, value, f"specexp.{objects.GROUPS[kind]}")
        known = objects.registered(kind) | {name: entry}
        monkeypatch.setattr(
            objects,
            "registered",
            lambda k, real=objects.registered: known if k == kind else real(k),
        )

    return call


def test_import_offers_ten_names_and_loads_no_torch():
    code = (
        "import sys, specexp; print(*specexp.__all__); print(specexp.__version__); "
        "print('torch' in sys.modules, 'transformers' in sys.modules, *dir(specexp)); "
        "from specexp import Tree, theory; print(Tree.chain(2), theory.__name__)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names, version, listed, found = run.stdout.splitlines()
    assert names == NAMES
    assert version[0].isdigit()
    assert listed == f"False False {NAMES.replace('Tree load', 'Tree __version__ load')}"
    assert found.endswith("specexp.theory")


@pytest.mark.parametrize(
    ("environment", "turns"),
    [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_waiting_threads_sleep_soon_unless_the_user_says_otherwise(environment, turns):
    code = "import os, specexp; print(os.environ.get('GOMP_SPINCOUNT'))"
    kept = {name: x for name, x in os.environ.items() if not name.startswith(("GOMP_", "OMP_W"))}
    shown = subprocess.check_output([sys.executable, "-c", code], env=kept | environment, text=True)
    assert shown.strip() == turns


def test_unknown_name_is_an_attribute_error_that_lists_the_ten():
    with pytest.raises(AttributeError, match="no 'Engin'; it offers Drafter, Engine"):
        specexp.Engin  # noqa: B018
    assert all(getattr(specexp, name).__doc__ for name in specexp.__all__)


def test_page_of_the_room_shows_the_ten_names():
    page = Path(specexp.__file__).with_name("README.md").read_text()
    assert len(page.splitlines()) <= 150
    assert all(f"**`{name}`**" in page for name in specexp.__all__)


@pytest.mark.parametrize("page", ["README.md", "specexp/README.md"])
def test_snippets_of_pages_run(page):
    names = {"__name__": "__main__"}
    text = (Path(specexp.__file__).parents[1] / page).read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        exec(block, names)


# --- objects in place of names -------------------------------------------------------------------


def test_output_has_text_tokens_trace_and_acceptance(load):
    pair = load("ngram")
    out = pair.generate(TEXTS, max_new_tokens=12)
    assert [pair.decode(tokens) for tokens in out.tokens] == out.text
    assert out.acceptance == out.trace.acceptance
    assert out.tokens_per_pass == out.acceptance.emitted / out.acceptance.passes >= 1
    one = pair.generate(TEXTS[0], max_new_tokens=12)
    assert one.text == out.text[:1]


def test_text_leaves_out_special_tokens(load, tokenizer, monkeypatch):
    pair = load("plain")
    eos = tokenizer.eos_token_id
    monkeypatch.setattr(pair.engine, "generate", lambda *_: types.SimpleNamespace(
        tokens=[[40, eos]], trace=None))  # fmt: skip
    out = pair.generate("x", 2)
    assert out.tokens == [[40, eos]]
    assert out.text == [tokenizer.decode([40])]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_modules_in_memory_decode_as_their_folders_do(tiny_folders, temperature):
    names = specexp.load(*tiny_folders, 3, temperature=temperature, seed=1)
    modules = specexp.load(
        names.target.module, names.engine.drafter.lm.module, 3, tokenizer=names.tokenizer,
        temperature=temperature, seed=1,
    )  # fmt: skip
    assert modules.generate(TEXTS, 16).tokens == names.generate(TEXTS, 16).tokens
    assert modules.engine.rule.name == names.engine.rule.name
    assert modules.engine.eos == names.engine.eos
    assert modules.options["dtype"] == "float32"


def test_target_in_memory_drafts_for_itself(load, target):
    out = load(target, temperature=1.0).generate(TEXTS, 16)
    assert out.acceptance.rate == 1


@pytest.mark.parametrize("drafter", [Echo(), Echo, lambda request: Echo(2), "support.own:Echo",
                                     "support.own:Echo:2"])  # fmt: skip
def test_drafter_as_instance_class_function_or_text(load, drafter):
    pair = load(drafter)
    assert isinstance(pair.engine.drafter, Echo)
    plain = pair.engine.plain().generate(pair.encode(TEXTS), 12).tokens
    assert pair.generate(TEXTS, 12).tokens == plain
    assert pair.drafter == (drafter if isinstance(drafter, str) else "echo")


@pytest.mark.parametrize("gamma", [None, 3])
def test_class_of_a_drafter_is_called_once(load, gamma):
    class Counted(Echo):
        made = 0

        def __init__(self):
            super().__init__()
            type(self).made += 1

    load(Counted, gamma=gamma)
    assert Counted.made == 1


def test_draft_length_that_was_not_given_is_the_usual_one_of_each_drafter(load):
    def short(request):
        return Prepared(lambda target: Echo(), draws=False, deepest=2)

    pair = load("ngram", gamma=None)
    assert [pair.gamma, pair.with_(drafter=short).gamma] == [5, 2]
    assert load(short, gamma=None).with_(drafter="ngram").gamma == 5
    assert load("ngram", gamma=None, tree="grown:4").gamma == 4
    assert load("ngram", gamma=4).with_(drafter=Echo()).gamma == 4


def test_a_tree_is_taken_as_its_name_is(load):
    pair, tree = load(Echo()), specexp.Tree.branching(2, 2)
    own, named = pair.with_(tree=tree), pair.with_(tree="2x2")
    assert own.engine.policy == named.engine.policy
    assert own.generate(TEXTS, 12).tokens == named.generate(TEXTS, 12).tokens
    assert repr(own.engine) == "Engine(LlamaForCausalLM, echo, match, greedy)"
    assert (own.gamma, load(Echo(), None, tree=specexp.Tree.grown(6, 4)).gamma) == (2, 4)
    assert "<td>6 draft tokens, 2 deep</td>" in own._repr_html_()
    with pytest.raises(UserError, match="and a policy are given"):
        own.with_(policy="always:2")
    with pytest.raises(UserError, match="gamma is 3 and the tree 2 deep: leave gamma out"):
        own.with_(gamma=3)


def test_a_path_is_taken_as_a_name():
    tiny = Path(__file__).parents[2] / "data/zoo/random-tiny"
    pair = specexp.load(tiny, tiny, 2)
    assert (pair.target.name, pair.drafter) == ("random-tiny", "random-tiny")
    assert pair.with_(drafter="ngram").with_(drafter=tiny).drafter == pair.drafter


def test_64_tokens_are_generated_where_no_number_is_given(load):
    engine = specexp.Engine.of(load("ngram").engine, eos=())
    pair = replace(load("ngram"), engine=engine)
    assert len(pair.generate("def mean").tokens[0]) == 64


def test_argument_of_a_class_reaches_it(load):
    assert load("support.own:Echo:3").engine.drafter.period == 3
    with pytest.raises(UserError, match=r"support.own:Echo: Echo\(3, 4\) cannot be called: too m"):
        load("support.own:Echo:3,4")


def test_prepared_of_a_function_is_built_on_the_loaded_target(load):
    seen = []

    def prepare(request):
        assert request.vocab == 300 or request.vocab > 0
        return Prepared(lambda target: seen.append(target) or Echo(), draws=False, deepest=2)

    pair = load(prepare, gamma=None)
    assert pair.deepest == pair.gamma == 2
    assert seen == [pair.target]


@pytest.mark.parametrize(
    ("tree", "line"),
    [
        (specexp.Tree.chain(3), "drafts at most 2 tokens ahead and the draft is 3 deep: use gamma"),
        (specexp.Tree.branching(3), "keeps 2 candidates per token and a node of the tree has 3 ch"),
    ],
)
def test_plan_that_the_drafter_cannot_draft_is_refused(load, tree, line):
    pair = load(lambda request: Prepared(lambda target: Echo(), deepest=2, widest=2), gamma=2)
    engine = specexp.Engine.of(pair.engine, policy=Fixed(tree))
    server = Server(EngineRows(engine, 1, 64, tree.room), engine.policy)
    server.submit(Request([1, 2], 4))
    for run in (partial(engine.generate, [[1, 2]], 4), server.step):
        with pytest.raises(UserError, match=f"policy Fixed: drafter echo {line}"):
            run()


def test_shipped_drafter_as_instance_gets_the_rule_for_its_q(load, draft, target):
    sampling = specexp.Sampling(1.0)
    pair = load(DraftModel(of_module(draft, "draft"), sampling), temperature=1.0)
    assert pair.engine.rule.name == "reject"
    pair = load(DraftModel(of_module(draft, "draft"), specexp.Sampling()), temperature=1.0)
    assert pair.engine.rule.name == "match"


@pytest.mark.parametrize("rule", [Fade(), Fade, "support.own:Fade"])
def test_rule_as_instance_class_or_text(load, rule):
    assert load("ngram", rule=rule).engine.rule.name == "fade"


def test_rule_with_an_argument(load):
    assert load("ngram", rule="specexp.rules:Reject:0.5").engine.rule.lenience == 0.5


@pytest.mark.parametrize("policy", [Alternate(3), "support.own:Alternate:3", "threshold:3,8"])
def test_policy_as_instance_or_text(load, policy):
    pair = load(Echo(), policy=policy)
    pair.generate(TEXTS, 12)
    assert pair.engine.policy.widest == 4


def test_entry_points_add_names(load, plugin):
    plugin("drafter", "echo", "support.own:Echo")
    plugin("rule", "fade", "support.own:Fade")
    plugin("policy", "alternate", "support.own:Alternate")
    pair = load("echo:3", rule="fade", policy="alternate:2")
    assert pair.engine.drafter.period == 3
    assert pair.engine.rule.name == "fade"
    assert pair.engine.policy.gamma == 2
    described = dict(objects.described("drafter", Path(drafters.__file__).parent))
    assert described["echo"] == "The text repeats itself after `period` tokens."
    assert set(described) == set(fitting.methods())
    assert [name for name, _ in objects.described("rule")] == ["fade"]
    assert pair.drafter == "echo:3"


def test_with_and_apart_keep_objects(load):
    pair = load(Echo(), policy=Alternate(3), rule=Fade())
    other = pair.with_(gamma=2)
    assert other.engine.drafter is pair.engine.drafter
    assert other.engine.rule is pair.engine.rule
    assert pair.with_(drafter="ngram", policy=None).engine.policy.tree.depth == 3
    apart = pair.apart()
    assert apart.engine.drafter is not pair.engine.drafter
    assert apart.target.module is pair.target.module
    assert apart.generate(TEXTS, 12).tokens == pair.generate(TEXTS, 12).tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_engines_that_share_a_drafter_take_turns(load, draft, temperature):
    """Each turn finds the drafter's caches as another engine left them."""
    sampling = specexp.Sampling(temperature)
    pair = load(DraftModel(of_module(draft, "draft"), sampling), temperature=temperature)
    pairs = [pair, pair.with_(gamma=2), pair.with_(tree="2x2", rule="match")]
    expected = pair.engine.plain().generate(pair.encode(TEXTS), 16).tokens
    for turn in range(3):
        for other in pairs if turn % 2 else reversed(pairs):
            tokens = other.with_(rule="match").generate(TEXTS, 16).tokens
            assert tokens == expected
            assert other.generate(TEXTS[: 1 + turn % 2], 8 + 8 * turn).acceptance.drafted


def test_apart_shares_weights_of_a_drafter_that_runs_models(load, draft):
    pair = load(DraftModel(of_module(draft, "draft"), specexp.Sampling()))
    pair.generate(TEXTS, 4)
    apart = pair.apart().engine.drafter
    assert apart.lm is not pair.engine.drafter.lm
    assert apart.lm.module is pair.engine.drafter.lm.module


def test_apart_refuses_a_drafter_that_cannot_be_copied(load):
    drafter = Echo()
    drafter.file = open(__file__)  # noqa: SIM115
    pair = load(drafter)
    with drafter.file, pytest.raises(UserError, match=r"Echo cannot be copied; pass its class"):
        pair.apart()


def test_objects_are_tried_on_copies(load):
    drafter, policy = Echo(), Alternate(3)
    load(drafter, policy=policy)
    assert drafter.calls == []
    assert policy.rounds == 0


def test_compare_with_plain_prints_the_speedup_and_the_verdict(load):
    pair = load(Echo(), temperature=1.0)
    comparison = pair.compare_with_plain([*TEXTS, "values"], max_new_tokens=8)
    assert comparison.exact
    assert comparison.n == 3
    assert comparison.speedup.low <= comparison.speedup.value <= comparison.speedup.high
    first, second = str(comparison).splitlines()
    assert first.startswith("speedup ")
    assert second.startswith("exact: 24 tokens in 3 rows compared with plain decoding: identical; ")
    assert f"detects a mean total variation of {comparison.exactness.detectable:.2g}" in second
    assert repr(comparison) == str(comparison)
    assert load(Ones(), rule="typical:0.9", temperature=1.0).compare_with_plain(
        TEXTS[0], 4).exact is False  # fmt: skip


def test_pairing_prints_as_what_was_asked_for_in_one_line(load):
    pair = load(Echo(), gamma=3, temperature=0.5)
    printed = repr(pair)
    assert "drafter='echo', gamma=3, temperature=0.5" in printed
    assert pair.target.name in printed
    assert "Engine" not in printed
    assert "\n" not in printed
    assert str(pair) == f"{pair.target.name} with echo, temperature 0.5"
    assert str(pair.with_(temperature=0, top_k=5)).endswith(" with echo, greedy")


def test_a_prompt_given_again_is_no_further_prompt(load):
    comparison = load(Echo()).compare_with_plain([*TEXTS, TEXTS[0]] * 6, max_new_tokens=2)
    assert comparison.n == len(TEXTS)
    assert comparison.speedup.doubt == f"too few prompts: at least {17 - len(TEXTS)} more"


def test_comparison_that_cannot_be_is_not_called_faster(load, monkeypatch):
    whole = one_pairing.latency_by_arm

    def disturbed(*arguments):
        samples = whole(*arguments)
        return samples.assign(plain_s=50 * samples["s"])

    monkeypatch.setattr(one_pairing, "latency_by_arm", disturbed)
    comparison = load(Echo()).compare_with_plain(TEXTS, max_new_tokens=8)
    said = str(comparison)
    value = f"{comparison.speedup.value:.2f}"
    assert said.startswith(f"speedup {value} [")
    assert said.count(value) == 1, "said once"
    assert "over 2 prompts: not credible: was the machine busy?" in said
    assert "faster" not in said


# --- bad input -----------------------------------------------------------------------------------


class Bad(Echo):
    """An Echo whose draft is spoilt by a function."""

    def __init__(self, spoil):
        super().__init__()
        self.spoil = spoil

    def propose(self, seqs, tree, rng):
        draft = super().propose(seqs, tree, rng)
        return self.spoil(draft) if tree.depth else draft


class NoPropose(specexp.Drafter):
    name = "still"


def with_q(q):
    def spoil(draft):
        B, N = draft.tokens.shape
        draft.q = q(B, N, 282)
        return draft

    return spoil


def put(token):
    def spoil(draft):
        draft.tokens[:, 1:] = token
        return draft

    return spoil


def fewer(draft):
    draft.tokens = draft.tokens[:, :-1]
    return draft


def another_root(draft):
    draft.tokens[:, 0] = (draft.tokens[:, 0] + 1) % 282
    return draft


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (lambda draft: draft.tokens, "drafter bad proposed a Tensor: return seqs.draft"),
        (fewer, "drafter bad proposed tokens [2, 2] over 4 nodes for a tree of 4 nodes in 2 rows"),
        (put(282), "drafter bad proposed token 282, outside the vocabulary of 282 tokens"),
        (put(-2), "drafter bad proposed token -2, outside the vocabulary"),
        (another_root, "drafter bad changed the root"),
        (with_q(lambda B, N, V: torch.ones(B, N, V) / 564), "bad returned a q that sums to 0.5"),
        (with_q(lambda B, N, V: torch.ones(B, N, V)), "returned a q that sums to 282"),
        (with_q(lambda B, N, V: -torch.ones(B, N, V)), "negative or non-finite entries"),
        (with_q(lambda B, N, V: torch.ones(B, V)), "returned q [2, 282] in torch.float32: it must"),
    ],
)
def test_invalid_draft_is_refused_by_the_drafters_name(load, spoil, line):
    with pytest.raises(UserError) as refused:
        load(Bad(spoil))
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


class Late(Bad):
    """Draws fine tokens while it is tried out, and one outside the vocabulary later."""

    on_host = True

    def __init__(self):
        super().__init__(self.later)
        self.rounds = 0

    def later(self, draft):
        self.rounds += 1
        return draft if self.rounds < 12 else put(282)(draft)


def test_draft_that_goes_wrong_after_the_trial_is_refused_by_the_drafters_name(load):
    pairing = load(Late())
    with pytest.raises(UserError, match="drafter late proposed token 282, outside the vocabulary"):
        pairing.generate("def mean(values):", 60)


def test_tree_wider_than_the_vocabulary_is_refused_by_its_width():
    with pytest.raises(UserError, match="a tree as wide as 30 is wider than the vocabulary of 27 "):
        fitting.fit("eagle", fitting.Limits(), specexp.Tree.grown(900, 900), 27, None, 0.0)


def judge(**parts):
    """A rule that is Match but for some parts of its verdict."""

    class Odd(specexp.Rule):
        def __call__(self, draft, p, rng):
            verdict = Match()(draft, p, rng)
            return Verdict(**(vars(verdict) | {k: f(draft, verdict) for k, f in parts.items()}))

    return Odd()


class NoVerdict(specexp.Rule):
    def __call__(self, draft, p, rng):
        return draft.tokens


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        (NoVerdict(), "rule noverdict returned a Tensor: return draft.judged(path, n, bonus)"),
        (
            judge(path=lambda d, v: v.path + 9),
            "rule odd returned a path through node 9 of a draft",
        ),
        (judge(path=lambda d, v: v.path[:, :2]), "rule odd returned path [2, 2] in int64: it must"),
        (judge(n=lambda d, v: v.n.float()), "rule odd returned n [2] in float32"),
        (judge(n=lambda d, v: v.n + 9), "rule odd accepted"),
        (
            judge(path=lambda d, v: v.path * 0 + 2),
            "rule odd returned a path that is none: ",
        ),
        (judge(new=lambda d, v: v.new * 0 + 999), "emits token 999, outside the vocabulary of 282"),
    ],
)
def test_invalid_verdict_is_refused_by_the_rules_name(load, rule, line):
    with pytest.raises(UserError) as refused:
        load(Ones(), rule=rule)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


class NoCall(specexp.Rule):
    pass


class Greedy:
    """A policy without `learn`."""

    widest = 4

    def choose(self, load):
        return specexp.Tree.chain(3)


class Wide(Alternate):
    def choose(self, load):
        return Plan(specexp.Tree.chain(9))


class Bare(Alternate):
    def choose(self, load):
        return specexp.Tree.chain(3)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"drafter": NoPropose}, "drafter NoPropose has no propose(self, seqs, tree, rng)"),
        ({"drafter": Reject}, "drafter Reject is a class, but not a drafter: subclass specexp.Dra"),
        ({"drafter": 7}, "drafter is 7: give a name, a specexp.Drafter"),
        (
            {"drafter": lambda request: 7},
            "drafter <lambda> returned something of type int: return a s",
        ),
        ({"drafter": "nowhere.mine:Echo"}, "there is no module nowhere.mine, neither installed"),
        ({"drafter": "nomod:Echo"}, "there is no module nomod, neither installed"),
        (
            {"rule": "nomod:Follow"},
            "rule nomod:Follow: there is no module nomod, neither installed",
        ),
        ({"policy": "nomod:Own"}, "policy nomod:Own: there is no module nomod, neither installed"),
        ({"drafter": "support.own:Ecko"}, "module support.own has no Ecko"),
        ({"drafter": torch.nn.Linear(2, 2)}, "draft model Linear is of type Linear: give a trans"),
        (
            {"rule": object()},
            "rule object has no name, lossy, wants_q, samples, chains_only",
        ),
        ({"rule": NoCall}, "rule NoCall has no __call__(self, draft, p, rng): define it"),
        ({"rule": "mach"}, "did you mean 'match'?"),
        ({"rule": specexp.Rule}, "rule Rule defines nothing itself: subclass it, or give a name"),
        ({"policy": specexp.Policy}, "policy Policy defines nothing itself: subclass it, or give"),
        ({"policy": Greedy()}, "policy Greedy has no learn(load, plan, steps, seconds)"),
        ({"policy": Wide(3)}, "policy Wide chose a tree with room 10, more than its `widest` of 4"),
        ({"policy": Bare(3)}, "policy Bare chose a Tree: return Plan(tree)"),
        ({"policy": "alwys:3"}, "policy 'alwys:3' is unknown"),
        (
            {"policy": "always:2", "tree": "grown:9"},
            "tree 'grown:9' and a policy are given, and a policy chooses the shape of every draft",
        ),
        ({"tokenizer": 3}, "tokenizer is of type int: give a transformers tokenizer"),
        ({"tokenizer": None}, "target LlamaForCausalLM is in memory: give its tokenizer too"),
        ({"dtype": "bfloat16"}, "is in float32, not bfloat16: convert it with .to(torch.bfloat16)"),
        ({"drafter": "model"}, "the zoo has nothing for LlamaForCausalLM, a target in memory"),
        ({"device": "cuda:1"}, "is on cpu, not cuda:1: move it with .to('cuda:1')"),
        ({"device": "tpu"}, "device 'tpu' is unknown; use auto, cpu, cuda or cuda:N"),
        ({"device": 0}, "device '0' is unknown; use auto, cpu, cuda or cuda:N"),
        ({"gamma": 2.5}, "gamma is 2.5; it must be a whole number"),
        ({"gamma": True}, "gamma is True; it must be a whole number"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"seed": "a"}, "seed is 'a'; it must be a whole number"),
        ({"seed": 2**63}, "seed is 9223372036854775808, which is too large a number"),
        ({"tree": 3}, "tree is 3; it must be a text"),
        ({"drafter": None}, "drafter is None: give a name"),
        ({"target": "random-tiny", "drafter": "ngram", "dtype": ""}, "dtype '' is unknown"),
    ],
)
def test_invalid_option_of_load_is_refused_by_name(target, tokenizer, options, line):
    usual = {"target": target, "drafter": Echo(), "gamma": 3, "tokenizer": tokenizer}
    with pytest.raises(UserError) as refused:
        specexp.load(**usual | options)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"temprature": 1.0}, "cannot change temprature; did you mean 'temperature'? (it can ch"),
        ({"dtype": "bfloat16"}, "with_ keeps the target and cannot change dtype (it can change dr"),
        ({"device": "cuda"}, "cannot change device (it can change drafter, gamma, temperature, "),
        ({"target": "sibling-3m"}, "cannot change target (it can change drafter, gamma, "),
        ({"gamma": None}, "gamma is None; it must be a whole number"),
    ],
)
def test_invalid_change_of_a_variant_is_refused(load, change, line):
    with pytest.raises(UserError, match=re.escape(line)):
        load(Echo()).with_(**change)


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda pair: pair.generate([3], 4), "a prompt is 3; it must be a text"),
        (lambda pair: pair.generate(None, 4), "texts is None; it must be a text or a list"),
        (lambda pair: pair.generate("a", 1.5), "max_new_tokens is 1.5; it must be a whole number"),
        (lambda pair: pair.generate("a", True), "max_new_tokens is True; it must be a"),
        (lambda pair: pair.generate("a", -1), "max_new_tokens is -1; it must be 0 or more"),
        (lambda pair: pair.engine.generate([[1], [9999]], 4), "prompt 2 has the token 9999; the"),
        (lambda pair: pair.engine.generate([[1, -1]], 4), "prompt 1 has the token -1; the target"),
        (lambda pair: pair.engine.generate([[1], [1.5]], 4), "prompt 2 is [1.5]; it must be a"),
        (lambda pair: pair.engine.generate([1, 2], 4), "prompt 1 is 1; it must be a list of whole"),
        (lambda pair: pair.engine.generate([[[1]]], 4), "prompt 1 is [[1]]; it must be a list"),
        (lambda pair: pair.engine.generate("ab", 4), "prompt 1 is 'a'; it must be a list of whole"),
        (lambda pair: pair.engine.generate([[True]], 4), "prompt 1 is [True]; it must be a list"),
        (lambda pair: pair.engine.generate([[2**80]], 4), "it must be a list of whole numbers"),
        (lambda pair: pair.engine.generate([[1]], 2.5), "max_new_tokens is 2.5; it must be a wh"),
        (lambda pair: pair.engine.generate([[1]], 4, [0.5]), "a stream is 0.5; it must be"),
        (lambda pair: pair.engine.generate([[1]] * 2, 4, torch.arange(2)), "a stream is tensor(0"),
        (lambda pair: specexp.Engine.of(pair.engine, seed=1.5), "seed is 1.5; it must be"),
        (lambda pair: specexp.Engine.of(pair.engine, eos=[1.5]), "an EOS token is 1.5; it"),
        (lambda pair: pair.compare_with_plain(3), "prompts is 3; it must be a text or a list"),
        (lambda pair: pair.compare_with_plain("a", "4"), "max_new_tokens is '4'; it must"),
        (lambda pair: pair.compare_with_plain("a", 4, 0), "repeats is 0; it must be 1 or more"),
        (lambda pair: pair.compare_with_plain("a", 0), "max_new_tokens is 0; it must be 1 or more"),
    ],
)
def test_invalid_prompts_and_counts_are_refused(load, call, line):
    with pytest.raises(UserError, match=re.escape(line)):
        call(load(Echo()))


def test_draft_model_of_another_dtype_is_refused(load, draft):
    other = copy.deepcopy(draft).to(torch.bfloat16)
    with pytest.raises(UserError, match=r"in bfloat16 and target .* in float32: convert one"):
        load(other)


@pytest.mark.parametrize(
    ("vocab", "line"),
    [(200, "200 logits for a tokenizer of 282"), (4000, "4000 logits and its tokenizer only 282")],
)
def test_tokenizer_of_another_size_is_refused(tokenizer, vocab, line):
    with pytest.raises(UserError, match=line):
        specexp.load(tiny_llama(0, 1, vocab=vocab), Echo(), 3, tokenizer=tokenizer)


def test_tokens_added_to_a_tokenizer_alone_are_never_written_and_not_read(tokenizer, caplog):
    more = copy.deepcopy(tokenizer)
    more.add_tokens(["<mine>", "<yours>"])
    pair = specexp.load(tiny_llama(0, 1, vocab=282), Echo(), 3, tokenizer=more)
    assert pair.target.vocab == 282
    assert "does not know the last 2 tokens of its tokenizer" in caplog.text
    pair.generate("mean(", 4)
    with pytest.raises(UserError, match="prompt 1 has the token 282; the target has 0 to 281"):
        pair.generate("mean(<mine>", 4)


def test_draft_model_with_fewer_logits_is_refused(load):
    with pytest.raises(UserError, match="LlamaForCausalLM has 200 logits for a tokenizer of 282"):
        load(tiny_llama(0, 1, vocab=200))


def test_exception_of_a_users_code_keeps_its_traceback(load):
    def spoil(draft):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        load(Bad(spoil))


def test_module_that_fails_on_import_is_named(load, tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("import nowhere_to_be_found")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"broken_module:Echo cannot be imported: No module named"):
        load("broken_module:Echo")


def test_only_the_named_module_of_the_working_folder_comes_before_others(tmp_path, monkeypatch):
    """Not a file there that is named as one of Python's, nor a folder as an installed package."""
    here, installed = tmp_path / "here", tmp_path / "installed"
    (here / "folder_of_packages").mkdir(parents=True)
    installed.mkdir()
    code = "import colorsys, beside_mine\nWhere = (colorsys, 'own')"
    (here / "drafter_of_mine.py").write_text(code)
    for path in (here / "colorsys.py", installed / "drafter_of_mine.py"):
        path.write_text("raise ImportError('shadowed')")
    (here / "beside_mine.py").touch()
    (installed / "folder_of_packages.py").write_text("Where = 'installed'")
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.chdir(here)
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    before = [*sys.path], [*sys.meta_path]
    (colorsys, own), _ = objects.find("drafter", "drafter_of_mine:Where")
    assert (own, hasattr(colorsys, "rgb_to_hsv")) == ("own", True)
    assert objects.find("rule", "folder_of_packages:Where") == ("installed", "")
    assert objects.find("policy", "colorsys:rgb_to_hsv") == (colorsys.rgb_to_hsv, "")
    assert ([*sys.path], [*sys.meta_path]) == before
