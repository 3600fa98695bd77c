"""Rounds in colour: each emitted token has its kind, and only rejected draft tokens are struck."""

import re
import warnings
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from support.questions import PROMPTS

from specexp import api, figures
from specexp.figures import pairings, style, tokens
from specexp.measure import one_pairing
from specexp.trace import Round, Step

PAIRING = SimpleNamespace(decode=lambda ids: "".join(f"{token} " for token in ids))


def rounds(*steps: Step) -> list[Round]:
    return [Round(1.0, 3, (step,)) for step in steps]


def styled(text) -> list[tuple[str, str]]:
    return [(text.plain[s.start : s.end].strip(), s.style) for s in text.spans]


def test_by_round_colours_every_kind_of_token():
    steps = rounds(Step(0, 3, 1, 2, (1, 2, 3)), Step(0, 3, 3, 4, (5, 6, 7)))
    text = tokens.by_round(PAIRING, steps, [1, 9, 5, 6, 7, 8])
    assert text.plain.splitlines() == ["  1  1/3  1 9 2 3 ", "  2  3/3  5 6 7 8 "]
    kinds = {look.style: kind for kind, look in tokens.LOOKS.items()}
    assert [(part, kinds[style]) for part, style in styled(text) if style in kinds] == [
        ("1", "accepted"), ("9", "corrected"), ("2 3", "rejected"), ("5 6 7", "accepted"),
        ("8", "bonus"),
    ]  # fmt: skip


def test_marks_stand_for_colours():
    steps = rounds(Step(0, 3, 1, 2, (1, 2, 3)), Step(0, 3, 3, 4, (5, 6, 7)))
    text = tokens.marked(tokens.by_round(PAIRING, steps, [1, 9, 5, 6, 7, 8]))
    assert text.plain.splitlines() == ["  1  1/3  [1 ]<9 >~2 3 ~", "  2  3/3  [5 6 7 ]+8 +"]
    assert not text.spans


def test_accepted_tokens_cut_off_are_not_rejected():
    text = tokens.by_round(PAIRING, rounds(Step(0, 3, 3, 1, (1, 2, 3))), [1])
    assert text.plain == "  1  3/3  1 "


def test_plain_steps_are_plain():
    text = tokens.stream(PAIRING, rounds(Step(0, 0, 0, 1), Step(0, 0, 0, 1)), [4, 5])
    assert styled(text) == [("4 5", "default")]


def test_a_row_of_a_batch_has_its_own_rounds():
    both = [Round(1.0, 3, (Step(0, 3, 1, 2, (1, 2, 3)), Step(1, 3, 3, 4, (5, 6, 7))))]
    text = tokens.stream(PAIRING, both, [5, 6, 7, 8], row=1)
    assert [part for part, _ in styled(text)] == ["5 6 7", "8"]


def test_text_of_a_model_is_no_html():
    decoder = SimpleNamespace(decode=lambda ids: "<img src=x>&" * len(ids))
    page = tokens.shaded(tokens.stream(decoder, rounds(Step(0, 1, 0, 1, (2,))), [1], "<b>"))
    assert page.count("<span") == 1
    assert "&lt;b&gt;<span" in page
    assert "&lt;img src=x&gt;&amp;</span></pre>" in page


def test_an_output_shows_its_rows_and_what_was_accepted(pairing):
    output = pairing.generate(["def mean(values):"] * 10, 6)
    page = output._repr_html_()
    assert page.count("<details>") == 8
    assert "<p>and 2 more rows</p>" in page
    assert f"all 10 rows: {output.acceptance}" in page
    assert repr(output) == f"Output({output.acceptance})"


def test_the_card_of_a_pairing_says_how_it_was_loaded(pairing):
    warm = pairing.with_(temperature=0.8, top_p=0.95, policy="threshold:2,8")
    rows = re.findall(r"<th>(.*?)</th>\s*<td>(.*?)</td>", warm._repr_html_())
    target, draft = warm.target, warm.engine.drafter.models[0]
    assert rows == [
        ("target", "target"), ("drafter", warm.drafter), ("draft", "chain, gamma 3"),
        ("policy", "threshold:2,8"), ("rule", "reject"),
        ("sampling", "temperature 0.8, top_p 0.95"),
        ("parameters", f"target {target.parameters:,}; draft {draft.parameters:,}"),
        ("device", "cpu"), ("dtype", "float32"),
    ]  # fmt: skip


def test_names_are_no_html(pairing):
    page = replace(pairing, drafter="<img src=x>")._repr_html_()
    assert "&lt;img src=x&gt;" in page
    assert "<img" not in page


def test_a_strip_of_two_rounds_can_be_read(pairing, monkeypatch):
    monkeypatch.setattr(style, "_subject", "a target with a drafter, 1 prompt of a file of mine")
    output = pairing.generate(PROMPTS[0].text, 12)
    few = replace(output.trace, rounds=output.trace.rounds[:2])
    figure = figures.rounds.strip(replace(output, trace=few))
    assert len(figure.axes[0].get_yticks()) == 2


@pytest.mark.filterwarnings("error:Glyph")
def test_a_strip_has_a_cell_for_every_token(pairing):
    output = pairing.generate("def mean(values):", 12)
    [axes] = (figure := figures.rounds.strip(output)).axes
    kinds = [k for _, line in tokens.by_kind(output.trace.rounds, output.tokens[0]) for k in line]
    assert len(axes.texts) == len(kinds)
    assert str(output.acceptance) in figure.get_suptitle().replace("\n", " ")
    assert "drawn" not in figure.get_suptitle()
    longer = pairing.generate("def mean(values):", 64)
    first = figures.rounds.strip(longer, most=8).get_suptitle()
    assert "; drawn: the first 8 rounds" in first.replace("\n", " ")


def test_tokens_of_other_scripts_are_drawn_in_fonts_that_are_installed(pairing, monkeypatch):
    """matplotlib's own fonts stand for those of a machine: one of them has a letter that DejaVu
    lacks."""
    monkeypatch.setattr(style, "SCRIPTS", ("not installed", "STIXGeneral"))
    style.fonts.cache_clear()
    monkeypatch.setattr(figures.rounds, "_label", lambda text: "\N{SCRIPT SMALL G}")
    try:
        figure = figures.rounds.strip(pairing.generate(PROMPTS[0].text, 4))
    finally:
        style.fonts.cache_clear()
    assert "STIXGeneral" in figure.axes[0].texts[0].get_fontfamily()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a glyph that is missing from all fonts is warned of
        figure.canvas.draw()


@pytest.mark.parametrize("new", [6, 7, 9])
def test_what_an_outputs_end_cuts_off_is_not_rejected(tiny_folders, new):
    """A target that drafts for itself: all that it drafts is accepted."""
    own = api.load(tiny_folders[0], drafter=tiny_folders[0], gamma=4)
    edges = one_pairing.edges({"own": own}, PROMPTS, new)
    assert edges["rate"].tolist() == [1.0] * 5


def test_edges_count_what_the_trace_counts(pairing):
    arms = {"tree": pairing.with_(tree="2x2"), "grown": pairing.with_(tree="grown:4", gamma=2)}
    edges = one_pairing.edges(arms, PROMPTS, 12)
    assert set(edges["arm"]) == {"tree"}
    record = arms["tree"].generate([p.text for p in PROMPTS], 12).acceptance
    assert edges["accepted"][0] == record.passes
    assert edges["accepted"][1:].sum() == record.accepted - record.cut
    figure = figures.rounds.trees(edges)
    assert len(figure.axes[0].texts) == 6
    assert "siblings" in figure.get_suptitle()
    chain = figures.rounds.trees(edges[(edges["child"] == 0) | (edges["depth"] == 0)].head(2))
    assert not re.search(r" to |siblings", chain.get_suptitle().splitlines()[0])
    nothing = figures.rounds.trees(edges.head(0))
    assert "grown" in nothing.axes[0].texts[0].get_text()


def test_a_tree_that_is_wider_than_a_page_leaves_no_room_empty():
    leaves = [{"arm": "1x20", "parent": 0, "depth": 1, "child": n, "rate": 0.1, "accepted": 10}
              for n in range(20)]  # fmt: skip
    root = leaves[0] | {"parent": -1, "depth": 0}
    figure = figures.rounds.trees(pd.DataFrame([root, *leaves]))
    assert figure.axes[0].get_position().height > 0.4


def test_a_node_that_was_never_accepted_says_nothing_of_its_children():
    nodes = [(-1, 0, 0, 1.0, 20), (0, 1, 0, 0.5, 10), (0, 1, 1, 0.0, 0), (1, 2, 0, 0.0, 0),
             (2, 2, 0, 0.0, 0)]  # fmt: skip
    edges = pd.DataFrame(nodes, columns=["parent", "depth", "child", "rate", "accepted"])
    [axes] = figures.rounds.trees(edges.assign(arm="2x1")).axes
    assert [text.get_text() for text in axes.texts] == ["50%", "0%", "0%", "–"]


def test_trees_are_drawn_as_trees():
    """Of two siblings of one token the first is accepted; what was not drafted has no line."""
    steps = rounds(Step(0, 5, 2, 3, (1, 1, 3, 2, 4, -1)))
    drawn = tokens.by_round(PAIRING, steps, [1, 2, 9], parents=[(-1, 0, 0, 1, 1, 2, 2)])
    assert tokens.marked(drawn).plain.splitlines() == [
        "  1  2/5  ",
        "       └─ [1 ]",
        "          └─ ~3 ~",
        "          └─ [2 ]",
        "             └─ <9 >",
        "       └─ ~1 ~",
        "          └─ ~4 ~",
    ]


def test_a_tree_ends_where_the_output_was_cut_off():
    """Below the last token that was kept, nothing is known to be rejected."""
    steps = rounds(Step(0, 3, 2, 1, (1, 2, 3)))
    drawn = tokens.by_round(PAIRING, steps, [1], parents=[(-1, 0, 1, 1)])
    assert tokens.marked(drawn).plain.splitlines() == ["  1  2/3  ", "       └─ [1 ]"]


def test_kinds_of_tokens_and_names_are_told_apart_in_grey():
    def apart(a: str, b: str) -> bool:
        return abs(lightness(a) - lightness(b)) >= 10

    for one, other in combinations(tokens.COLOURS, 2):
        hatches = {tokens.HATCHED.get(kind) for kind in (one, other)}
        assert len(hatches) == 2 or apart(tokens.COLOURS[one], tokens.COLOURS[other]), (one, other)
    looks = style.marks([f"name {n}" for n in range(len(style.SYMBOLS))])
    for one, other in combinations(looks.values(), 2):
        assert one["marker"] != other["marker"] or apart(one["color"], other["color"])
    assert len(set(style.HATCHES)) == len(style.HATCHES) >= len(pairings.PHASES)


def lightness(colour: str) -> float:
    """CIE L*, 0 to 100."""
    light = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    y = 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2]
    return 116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y
