"""One generation in colour, token by token and round by round, for notebooks and the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import chain, groupby, islice, repeat
from typing import TYPE_CHECKING, NamedTuple

from rich.text import Text

from specexp.trace import Round, Step

if TYPE_CHECKING:
    from specexp.api import Output, Pairing

COLOURS = {
    "accepted": "#009e60", "corrected": "#e69f00", "bonus": "#2f8fd8", "plain": "#8c8c8c",
    "rejected": "#d55e00", "discarded": "#c8c8c8",
}  # fmt: skip
HATCHED = {"rejected": "//", "corrected": "..", "bonus": "\\\\", "plain": "--"}  # for grey


class Look(NamedTuple):
    """How a kind of token is shown: style, in a terminal; mark, in one without colours ({}: the
    token); shade, as CSS, on a light or a dark page ({}: the kind's colour); and what it means."""

    style: str
    mark: str
    shade: str
    meaning: str


LOOKS = {
    "accepted": Look("green", "[{}]", "background: {}50", "draft token accepted"),
    "corrected": Look("bold yellow", "<{}>", "background: {}66; font-weight: bold",
                      "target's token where none was accepted"),
    "bonus": Look("bold cyan", "+{}+",
                  "background: {}50; font-weight: bold; text-decoration: underline",
                  "target's token after an accepted draft"),
    "plain": Look("default", "{}", "", "unmarked: nothing drafted"),
    "rejected": Look("dim strike red", "~{}~", "background: {}33; text-decoration: line-through",
                     "draft token rejected"),
}  # fmt: skip


def stream(
    decoder: Pairing | Output, rounds: Sequence[Round], tokens: Sequence[int],
    prompt: str = "", row: int = 0,
) -> Text:  # fmt: skip
    """The prompt, dim, and its output (one row of the rounds), each token in the colour of its kind
    (see `legend`)."""
    lines = by_kind(rounds, tokens, row)
    kinds = [token for step, line in lines for token in line[: step.emitted]]
    return Text().append(prompt, "dim").append_text(_coloured(decoder, kinds))


def by_round(
    decoder: Pairing | Output, rounds: Sequence[Round], tokens: Sequence[int], row: int = 0,
    parents: Sequence[Sequence[int]] = (),
) -> Text:  # fmt: skip
    """One line a round: accepted/drafted, the tokens emitted, then the rejected draft tokens. Given
    the parents of each draft's nodes, it is drawn as a tree, a token a line below its parent."""
    lines = []
    each = zip(by_kind(rounds, tokens, row), chain(parents, repeat(None)), strict=False)
    for number, ((step, kinds), tree) in enumerate(each, 1):
        line = Text().append(f"{number:3d}  {step.accepted}/{step.drafted}  ", "dim")
        if tree is None:
            line.append(_coloured(decoder, kinds, visible=True))
        else:
            for depth, token, kind in _tree_lines(tree, step, kinds[: step.emitted]):
                line.append("\n       " + "   " * depth + "└─ ", "dim")
                line.append(_coloured(decoder, [(token, kind)], visible=True))
        lines.append(line)
    return Text("\n").join(lines)


def _tree_lines(
    parents: Sequence[int], step: Step, emitted: Sequence[tuple[int, str]] | None, node: int = 0
) -> Iterator[tuple[int, int, str]]:
    """(depth, token, kind) of the tokens below a node of a round's draft, in the order of printing:
    depth first, and after the children of the last accepted node the target's own token. emitted:
    (token, kind) of those emitted below it, [] if the output ended here; None: it was rejected."""
    if emitted is not None and not emitted:
        return
    (kept, kind), *deeper = emitted or [(-1, "")]
    for child in (i for i, p in enumerate(parents) if p == node and step.draft[i - 1] >= 0):
        token = step.draft[child - 1]
        accepted = kind == "accepted" and token == kept
        yield 0, token, "accepted" if accepted else "rejected"
        for depth, below, its in _tree_lines(parents, step, deeper if accepted else None, child):
            yield depth + 1, below, its
        kind = "" if accepted else kind  # a sibling of the same token is none
    if kind in ("corrected", "bonus"):
        yield 0, kept, kind


def by_kind(
    rounds: Sequence[Round], tokens: Sequence[int], row: int = 0
) -> Iterator[tuple[Step, list[tuple[int, str]]]]:
    """For each round of a row its step, and (token, kind) of the tokens emitted, then of the
    rejected draft tokens."""
    left = iter(tokens)
    for depth, step in ((r.depth, step) for r in rounds for step in r.steps if step.row == row):
        whole = step.accepted == min(depth, step.drafted)
        last = "plain" if not step.drafted else "bonus" if whole else "corrected"
        emitted = list(islice(left, step.emitted))
        rejected = [t for t in step.draft if t >= 0]
        for token in emitted[: step.accepted]:
            rejected.remove(token)
        if step.emitted < step.accepted:  # the output ended among accepted tokens
            rejected = []
        kinds = ["accepted" if i < step.accepted else last for i in range(len(emitted))]
        yield step, [*zip(emitted, kinds, strict=True), *((t, "rejected") for t in rejected)]


def legend(rounds: bool = True) -> Text:
    """What the looks mean; without `rounds`, which show them, not that of rejected draft tokens."""
    looks = [look for kind, look in LOOKS.items() if rounds or kind != "rejected"]
    return Text("  ").join(Text(look.meaning, look.style) for look in looks)


def marked(text: Text) -> Text:
    """The same text with marks for its colours, for where there are none."""
    return Text(_by_kind(text, lambda kind, part: LOOKS[kind].mark.format(part)))


def shaded(text: Text) -> str:
    """The same text as HTML, readable on a light and on a dark page."""

    def span(kind: str, part: str) -> str:
        shade = LOOKS[kind].shade.format(COLOURS[kind])
        return f'<span style="{shade}">{escape(part)}</span>'

    style = (  # a page may break the words of its outputs anywhere
        "font-family: monospace; white-space: pre-wrap; word-break: normal; overflow-wrap: anywhere"
    )
    return f'<pre style="{style}">{_by_kind(text, span, escape)}</pre>'


def _by_kind(text: Text, show: Callable[[str, str], str], other: Callable[[str], str] = str) -> str:
    """The text, its parts that have a kind replaced by show(kind, part), others by other(part)."""
    kinds = {look.style: kind for kind, look in LOOKS.items()}
    pieces, at = [], 0
    for span in text.spans:
        if (kind := kinds.get(str(span.style))) is not None:
            part = show(kind, text.plain[span.start : span.end])
            pieces += [other(text.plain[at : span.start]), part]
            at = span.end
    return "".join([*pieces, other(text.plain[at:])])


def symbols(text: str) -> str:
    """The text in one line, with symbols for line ends and tabs."""
    return text.replace("\n", "⏎").replace("\t", "⇥")


def cut(label: str) -> str:
    """A label, cut if it is long."""
    return label if len(label) <= 12 else label[:11] + "…"


def _coloured(
    decoder: Pairing | Output, kinds: Sequence[tuple[int, str]], visible: bool = False
) -> Text:
    """Tokens by kind, decoded. Neighbours of one kind are decoded together, since a
    character may span several tokens. visible: show line ends and tabs as symbols."""
    text = Text()
    for kind, group in groupby(kinds, key=lambda piece: piece[1]):
        part = decoder.decode([token for token, _ in group])
        text.append(symbols(part) if visible else part, LOOKS[kind].style)
    return text
