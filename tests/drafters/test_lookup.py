"""A lookup before another drafter: each row gets the lookup's draft where the text repeats itself,
and elsewhere what the other would draft with a cache that holds the text and nothing else."""

import copy
import json
import shutil

import pytest
import torch
from conftest import in_turn
from support.tiny import PROMPTS, V, drafter, engine, module

import specexp
from specexp import api
from specexp.drafters import Drafter
from specexp.drafters.lookup import Lookup
from specexp.drafters.model import DraftModel, of_model
from specexp.drafters.suffix import Suffix
from specexp.engine import Engine
from specexp.errors import UserError
from specexp.measure.exactness import certify
from specexp.models.load import of_module
from specexp.rules import Rule
from specexp.sampling import Sampling
from specexp.sequences import Sequences
from specexp.tree import Tree
from specexp.zoo import naming

LEAST = 2
SHAPES = {
    "chain": [Tree.chain(2), Tree.chain(4)],
    "branching": [Tree.branching(2, 2), Tree((-1, 0, 0, 0, 1, 1, 3, 4))],
    "grown": [Tree.grown(9, 3), Tree.grown(12, 2)],
}
KINDS = ["model", "parallel", "eagle", "eagle3", "peagle", "mtp", "dflash", "dflash2", "dspark",
         "medusa", "early_exit"]  # fmt: skip


class Tossed(Rule):
    """Keeps draft tokens as coins fall and ends a round with one of three tokens, so that the text
    repeats itself at times, and what it repeats is kept as often as what the other drafted."""

    def __init__(self) -> None:
        self.coins = torch.Generator().manual_seed(0)

    def __call__(self, draft, p, rng):
        ok = torch.rand(draft.tokens.shape, generator=self.coins) < 0.9
        path, n = draft.nodes.accepted(ok & (draft.tokens >= 0))
        return draft.judged(path, n, torch.randint(0, 3, n.shape, generator=self.coins))


def repeats(text: list[int]) -> bool:
    """Whether the last LEAST tokens of a text occurred before."""
    return text[-LEAST:] in [text[i : i + LEAST] for i in range(len(text) - LEAST)]


@torch.inference_mode()
def check(kind: str, shape: str, temperature: float = 0.0, rounds: int = 16) -> dict[str, int]:
    """Assert, in every round of a ragged batch, what each row is proposed; every fourth round is
    plain. Returns how many drafts were the lookup's, how many the other's, and how many of those
    came after tokens that the other drafter had not drafted."""
    made = engine("null", "empty", temperature=temperature)
    own = drafter(kind, made.target, made.sampling)
    made = Engine.of(made, drafter=Lookup(Suffix(V, 8), own, LEAST), rule=Tossed())
    seqs = made.begin(Sequences.of(PROMPTS, 70, slack=30))
    seen = {"lookup": 0, "other": 0, "after another's": 0}
    foreign = [False] * len(PROMPTS)
    for number in range(rounds):
        tree = Tree.chain(0) if number % 4 == 3 else SHAPES[shape][number // 2 % 2]
        if number % 4 == 0 and number:
            made.drafter.catch_up(seqs, 1)
        draft = made.draft(seqs, tree)
        rows = zip(seqs.tokens.tolist(), seqs.length.tolist(), strict=True)
        texts = [row[:n] for row, n in rows]
        if tree.depth:
            fresh = engine("null", "empty", temperature=temperature)
            fresh = Engine.of(fresh, drafter=drafter(kind, fresh.target, fresh.sampling))
            begun = fresh.begin(Sequences.of(texts, 8, slack=tree.room))
            alone = fresh.draft(begun, tree)
            found = Suffix(V, 8).propose(begun, tree, fresh.rng)
            for row, text in enumerate(texts):
                looked_up = repeats(text) and int(found.tokens[row, 1]) >= 0
                wanted = found if looked_up else alone
                assert torch.equal(draft.tokens[row], wanted.tokens[row]), (number, row)
                shapes = (made.nodes.parents.expand(len(texts), -1) for made in (draft, wanted))
                assert torch.equal(*(parents[row] for parents in shapes))
                if draft.q is not None:
                    q = torch.zeros_like(alone.q[row]) if looked_up else alone.q[row]
                    assert torch.allclose(draft.q[row], q, atol=1e-9)
                seen["lookup" if looked_up else "other"] += 1
                seen["after another's"] += foreign[row] and not looked_up
        target = made.verify(seqs, draft)
        verdict = made.accept(draft, target)
        for row in range(len(texts)):
            kept = verdict.path[row, 1 : int(verdict.n[row]) + 1]
            own_tokens = alone.tokens[row] if tree.depth else draft.tokens[row]
            foreign[row] = not torch.equal(draft.tokens[row, kept], own_tokens[kept])
        made.commit(seqs, draft, verdict, target)
    return seen


@pytest.mark.parametrize(("kind", "shape"), in_turn(KINDS, SHAPES))
def test_rows_get_the_lookups_draft_or_what_the_other_drafts_alone(kind, shape):
    for temperature in (0.0, 0.9):
        assert min(check(kind, shape, temperature).values()) > 2


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_a_network_drafts_one_token_where_the_lookup_drafts(shape, monkeypatch):
    made = engine("null", "empty", temperature=0.0)
    own = drafter("model", made.target, made.sampling)
    made = Engine.of(made, drafter=Lookup(Suffix(V, 8), own, LEAST))
    repeated, other = [1, 2, 3, 4, 1, 2], [1, 2, 3, 4, 5, 6]
    seqs = made.begin(Sequences.of([repeated, other], 20, slack=30))
    fed, feed = [], own.lm.feed
    monkeypatch.setattr(own.lm, "feed", lambda s, tokens, *a, **k: (
        fed.append(tokens.clone()), feed(s, tokens, *a, **k))[1])  # fmt: skip
    tree = SHAPES[shape][0]
    made.draft(seqs, tree)
    committed, *levels = fed
    assert len(levels) == tree.depth - 1
    assert (committed >= 0).all()
    for tokens in levels:
        assert (tokens[0] == -1).all()
        assert (tokens[1] >= 0).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_draft_model_that_is_not_told_reads_tokens_that_were_not_kept(shape, monkeypatch):
    monkeypatch.setattr(DraftModel, "give_way", lambda _: None)
    with pytest.raises(AssertionError):
        check("model", shape)


@pytest.mark.parametrize("family", ["gemma3", "mamba"])
def test_a_model_that_cannot_read_a_token_twice_is_refused(family):
    own = of_model(of_module(copy.deepcopy(module(family)), "mine"), Sampling())
    with pytest.raises(UserError, match=r"mine cannot draft .* behind a lookup: it has states or"):
        Lookup(Suffix(V), own)


@pytest.mark.parametrize("kind", ["crossed", "planted"])
def test_a_drafter_whose_draft_nothing_can_replace_is_refused(kind):
    made = engine(kind, "chain")
    with pytest.raises(UserError, match="cannot draft behind a lookup: its"):
        Lookup(Suffix(V), made.drafter)


def test_a_window_is_refused_before_weights_are_loaded(tiny_folders, tmp_path, monkeypatch):
    monkeypatch.setattr(api, "load_model", pytest.fail)
    target, draft = tiny_folders
    folder = shutil.copytree(draft, tmp_path / "windowed")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": 8}))
    with pytest.raises(UserError, match=r"windowed cannot draft .* behind a lookup"):
        specexp.load(str(target), drafter=f"lookup:{folder}")


@pytest.mark.parametrize(
    ("name", "full"),
    [("lookup", ("lookup", "model")), ("lookup:sibling-1m", ("lookup", "model:sibling-1m")),
     ("lookup:eagle", ("lookup", "eagle")), ("lookup:model:a/b+int8", ("lookup", "model:a/b+int8")),
     ("lookup:early_exit:2", ("lookup", "early_exit:2"))],
)  # fmt: skip
def test_the_drafter_behind_a_lookup_is_named_as_by_itself(name, full):
    assert naming.method_of(name) == full


def test_a_lookup_has_the_full_name_and_the_folder_of_the_drafter_behind_it():
    assert naming.full_name("lookup", "target-10m") == "lookup:sibling-3m"
    assert naming.full_name("lookup:eagle", "target-10m") == "lookup:eagle"
    for name in ("sibling-1m", "eagle", "mtp", "early_exit:2"):
        behind = naming.source_of(name, "target-10m")
        assert naming.source_of(f"lookup:{name}", "target-10m") == behind
    pair = specexp.load("target-10m", drafter="lookup:dflash", temperature=1.0)
    assert (pair.engine.rule.name, pair.deepest, pair.drafter) == ("reject", 7, "lookup:dflash")


@pytest.mark.parametrize(
    ("behind", "said"),
    [*((name, "goes before") for name in ("ngram", "plain", "lookup:eagle", "crossed:sibling-3m",
                                          "planted:0.5", "recycle", "support.own:Own")),
     ("eagel", "did you mean 'eagle'"), ("early_exit:0", "whole number"),
     ("mtp", "has no layer for multi-token")],
)  # fmt: skip
def test_a_lookup_before_what_has_no_network_is_refused_in_one_line(behind, said):
    with pytest.raises(UserError, match=said) as refused:
        specexp.load("target-10m", drafter=f"lookup:{behind}")
    assert "\n" not in str(refused.value)


def test_a_pairing_apart_shares_the_weights_of_the_heads_behind_a_lookup():
    pair = specexp.load("target-10m", drafter="lookup:eagle", gamma=3)
    own = pair.with_(drafter=pair.engine.drafter)
    other = own.apart().engine.drafter.other
    assert other.net is pair.engine.drafter.other.net
    assert other.lm is not pair.engine.drafter.other.lm


class Mixed(Drafter):
    """Repeats the root, in every second row as if it had been drawn from a one-hot q."""

    draws = True

    def propose(self, seqs, tree, rng):
        q = torch.zeros(len(seqs.tokens), len(tree), 282)
        q[::2] = q[::2].scatter(-1, seqs.root[::2, None].expand(-1, len(tree), 1), 1.0)
        return seqs.draft(tree.nodes("cpu"), seqs.root.expand(-1, len(tree) - 1), q)


def test_a_drafter_of_ones_own_may_draw_in_some_rows_and_choose_in_others(tiny_folders):
    pair = specexp.load(tiny_folders[0], drafter=Mixed(), gamma=3, temperature=1.0)
    assert pair.engine.rule.name == "reject"
    assert certify(pair.engine, [[5, 6, 5, 6], [7, 8, 9]] * 8, 24).bugs == 0
