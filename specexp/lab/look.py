"""What the rounds of one stream did, in colour: for notebooks and the command line alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Group
from rich.text import Text

from specexp.lab.build import Rig
from specexp.trace import Round, Step

STYLES = {
    "accepted": "green",
    "corrected": "bold yellow",
    "bonus": "bold cyan",
    "plain": "default",
    "rejected": "dim strike red",
}


def pieces(step: Step, tokens: Sequence[int], depth: int) -> Iterator[tuple[int, str]]:
    """(token, kind) of what one round delivered: tokens are the `step.emitted` ones."""
    whole = step.accepted == min(depth, step.drafted)
    last = "plain" if not step.drafted else "bonus" if whole else "corrected"
    for i, token in enumerate(tokens):
        yield token, "accepted" if i < step.accepted else last


def stream(rig: Rig, rounds: Sequence[Round], tokens: Sequence[int], row: int = 0) -> Text:
    """The whole text, each token in the colour of how it came about."""
    parts = _parts(rounds, tokens, row)
    made = [piece for step, part, depth in parts for piece in pieces(step, part, depth)]
    return _coloured(rig, made)


def by_round(rig: Rig, rounds: Sequence[Round], tokens: Sequence[int], row: int = 0) -> Text:
    """One line a round: what was kept, what was corrected, and the guesses thrown away."""
    text = Text()
    for number, (step, part, depth) in enumerate(_parts(rounds, tokens, row), 1):
        text.append(f"{number:3d}  {step.accepted}/{step.drafted}  ", "dim")
        wrong = [t for t in step.guesses if t >= 0]
        for token in part[: step.accepted]:
            wrong.remove(token)
        made = [*pieces(step, part, depth), *((t, "rejected") for t in wrong)]
        text.append(_coloured(rig, made, visible=True))
        text.append("\n")
    return text


def legend() -> Text:
    return Text("  ").join(Text(kind, style) for kind, style in STYLES.items())


def look(rig: Rig, prompt: str, max_new_tokens: int = 48) -> Group:
    """Generate once and show it: the stream in colour, then round by round."""
    made = rig.generate([prompt], max_new_tokens)
    rounds, tokens = made.trace.rounds, made.tokens[0]
    return Group(
        legend(), Text(""), Text(prompt, "dim") + stream(rig, rounds, tokens), Text(""),
        by_round(rig, rounds, tokens),
    )  # fmt: skip


def _parts(
    rounds: Sequence[Round], tokens: Sequence[int], row: int
) -> Iterator[tuple[Step, Sequence[int], int]]:
    """Each round of a row: its step, the tokens it delivered, how deep its draft was."""
    at = 0
    for found in rounds:
        for step in (s for s in found.steps if s.row == row):
            yield step, tokens[at : at + step.emitted], found.depth
            at += step.emitted


def _coloured(rig: Rig, made: Sequence[tuple[int, str]], visible: bool = False) -> Text:
    """Neighbours of one kind are decoded together, since a character may span tokens."""
    text = Text()
    for kind, group in groupby(made, key=lambda piece: piece[1]):
        said = rig.decode([token for token, _ in group])
        text.append(said.replace("\n", "⏎").replace("\t", "⇥") if visible else said, STYLES[kind])
    return text
