"""Rounds in colour: each emitted token has its kind, and only rejected draft tokens are struck."""

from types import SimpleNamespace

from specexp.figures import tokens
from specexp.trace import Round, Step

PAIRING = SimpleNamespace(decode=lambda ids: "".join(f"{token} " for token in ids))


def rounds(*steps: Step) -> list[Round]:
    return [Round(1.0, 4, 3, (step,)) for step in steps]


def styled(text) -> list[tuple[str, str]]:
    return [(text.plain[s.start : s.end].strip(), s.style) for s in text.spans]


def test_by_round_colours_every_kind_of_token():
    steps = rounds(Step(0, 3, 1, 2, (1, 2, 3)), Step(0, 3, 3, 4, (5, 6, 7)))
    text = tokens.by_round(PAIRING, steps, [1, 9, 5, 6, 7, 8])
    assert text.plain.splitlines() == ["  1  1/3  1 9 2 3 ", "  2  3/3  5 6 7 8 "]
    kinds = {style: kind for kind, style in tokens.STYLES.items()}
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
    assert text.plain == "  1  3/3  1 \n"


def test_plain_steps_are_plain():
    text = tokens.stream(PAIRING, rounds(Step(0, 0, 0, 1), Step(0, 0, 0, 1)), [4, 5])
    assert styled(text) == [("4 5", "default")]


def test_look_is_coloured_in_a_notebook():
    steps = rounds(Step(0, 3, 1, 2, (1, 2, 3)), Step(0, 3, 3, 4, (5, 6, 7)))
    output = SimpleNamespace(trace=SimpleNamespace(rounds=steps), tokens=[[1, 9, 5, 6, 7, 8]])
    pairing = SimpleNamespace(decode=PAIRING.decode, generate=lambda *_: output)
    shown = tokens.look(pairing, "prompt ")._repr_mimebundle_([], [])["text/html"]
    assert all(f">{words}<" in shown for words in ("prompt ", "accepted", "1 ", "9 ", "2 3 ", "8 "))
    assert shown.count("color: #008000; text-decoration-color: #008000") == 5  # none of them dim
    assert "line-through" in shown
