"""Servers that run elsewhere, as their client sees them: one beside the same without drafting.

`server`: a server's greedy completions, timed, and its counts of drafts (`dialects`, `connection`).
`loops`: both servers under load. Notebooks read all that they need from here.
"""

from specexp.measure.servers.loops import Pair, closed_loops, connect, metrics, rates
from specexp.measure.servers.server import Server
