"""The two ways a run can be refused; anything else that is raised is a bug."""


class UserError(Exception):
    """Bad input. The message is one line: what is wrong and what to do; `code` is for the shell."""

    code = 2


class NonFiniteLogits(Exception):
    """A model produced NaN or infinite logits; no token drawn from them is ever emitted."""


def first_line(e: BaseException) -> str:
    """What an exception says, in a line; what it is, if it says nothing."""
    return next(iter(str(e).strip().splitlines()), type(e).__name__)


def ran_out(said: str) -> bool:
    """Is this what torch says where a CPU's memory has run out? It raises a RuntimeError."""
    return "not enough memory" in said or "can't allocate memory" in said
