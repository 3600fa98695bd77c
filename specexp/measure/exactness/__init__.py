"""Losslessness check of every run: is the output the target's own?

Five questions, each about what ran (verdict.py puts the answers together):

- Are caches, masks and positions right? Greedy output is compared with plain greedy decoding,
  sampled output under common noise: with the rule Match it must equal plain sampling exactly.
- Can plain and speculative be wrong alike? The logits of a sample of rounds are compared with those
  of the unmodified module without a cache (reference.py).
- Are draft tokens drawn from the q that is reported, and does the rule that ran keep p? Draws of
  real rounds are counted against their own distributions (draws.py).
- Does the drafter remember text, so that what it accepts here is not what it would accept of new
  text (memory.py)? That is no fault of the output, but is said beside it.
- How small a fault would be detected? The verdict states it beside the answer.

(Tests prove by exact enumeration that the shipped rules keep the distribution.)
"""

from specexp.measure.exactness.memory import ALIKE, remembers
from specexp.measure.exactness.reference import TOLERANCE, Reference, near_winners
from specexp.measure.exactness.verdict import Divergence, Exactness, certify, check_rounds, compare
