"""Does a drafter remember text? If so, more of its draft tokens are accepted on text that it has
seen, and checks, warm-ups and other arms show it every prompt before anything is timed.

So it is tried on new text, prompts included (a memory may depend on the prompt): sampled from the
target with noise of its own, and then the very same text twice more (some memories keep only what
recurs). Under the rule Match the text is the target's sample each time, whatever is drafted, and a
drafter without a memory is right equally often each time.
"""

from collections.abc import Sequence
from itertools import count, islice

from specexp.engine import Engine
from specexp.policy import Fixed, single_stream_tree
from specexp.rules import Match
from specexp.sampling import Sampling

ALIKE = 0.02  # how far the passes of equal runs may differ, from near ties alone
ROWS, PROMPT, TOKENS, HOT = 4, 8, 32, 2.0  # when hot, no two samples are alike

_unseen = count(1 << 20)  # streams of noise that this process has not used


def remembers(engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> str:
    """What the engine's drafter accepts of new text and of the same text again, in words; empty if
    that is alike, or if nothing is drafted."""
    tree = single_stream_tree(engine.policy)
    if not tree.depth:
        return ""
    apart = {"policy": Fixed(tree), "sampling": Sampling(HOT), "rule": Match(), "eos": ()}
    tried, prompts = Engine.of(engine, **apart), prompts[-ROWS:]
    streams = list(islice(_unseen, 2 * len(prompts)))
    own, noise = streams[: len(prompts)], streams[len(prompts) :]
    shown = min(max_new_tokens, PROMPT)
    unseen = tried.plain().generate(prompts, shown, own).tokens
    most = min(max_new_tokens, TOKENS, engine.target.context - shown)
    new, *again = (tried.generate(unseen, most, noise).trace.acceptance.length for _ in range(3))
    if not max(again) > (1 + ALIKE) * new:
        return ""
    return f"{new:.2f} tokens per pass on new text, {max(again):.2f} on the same text again"
