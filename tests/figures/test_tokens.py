"""Rounds in colour: each emitted token has its kind, and only rejected guesses are struck."""

from types import SimpleNamespace

from specexp.figures import tokens as look
from specexp.trace import Round, Step

RIG = SimpleNamespace(decode=lambda tokens: "".join(f"{token} " for token in tokens))


def rounds(*steps: Step) -> list[Round]:
    return [Round(1.0, 4, 3, (step,)) for step in steps]


def styled(text) -> list[tuple[str, str]]:
    return [(text.plain[s.start : s.end].strip(), s.style) for s in text.spans]


def test_a_line_a_round_tells_accepted_corrected_bonus_and_rejected():
    made = look.by_round(
        RIG, rounds(Step(0, 3, 1, 2, (1, 2, 3)), Step(0, 3, 3, 4, (5, 6, 7))), [1, 9, 5, 6, 7, 8]
    )
    assert made.plain.splitlines() == ["  1  1/3  1 9 2 3 ", "  2  3/3  5 6 7 8 "]
    kinds = {style: kind for kind, style in look.STYLES.items()}
    found = [(said, kinds[style]) for said, style in styled(made) if style in kinds]
    assert found == [("1", "accepted"), ("9", "corrected"), ("2 3", "rejected"),
                     ("5 6 7", "accepted"), ("8", "bonus")]  # fmt: skip


def test_accepted_guesses_that_the_end_cut_off_are_not_called_rejected():
    made = look.by_round(RIG, rounds(Step(0, 3, 3, 1, (1, 2, 3))), [1])
    assert made.plain == "  1  3/3  1 \n"


def test_plain_steps_are_plain():
    made = look.stream(RIG, rounds(Step(0, 0, 0, 1), Step(0, 0, 0, 1)), [4, 5])
    assert styled(made) == [("4 5", "default")]


def test_a_notebook_displays_all_of_it_in_colour():
    steps = rounds(Step(0, 3, 1, 2, (1, 2, 3)), Step(0, 3, 3, 4, (5, 6, 7)))
    made = SimpleNamespace(trace=SimpleNamespace(rounds=steps), tokens=[[1, 9, 5, 6, 7, 8]])
    pairing = SimpleNamespace(decode=RIG.decode, generate=lambda *_: made)
    shown = look.look(pairing, "prompt ")._repr_mimebundle_([], [])["text/html"]
    assert all(f">{words}<" in shown for words in ("prompt ", "accepted", "1 ", "9 ", "2 3 ", "8 "))
    assert shown.count("color: #008000; text-decoration-color: #008000") == 5  # none of them dim
    assert "line-through" in shown
