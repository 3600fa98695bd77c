"""The two errors a run may end with; any other exception is a bug."""


class UserError(Exception):
    """Bad input. The message is one line: what is wrong and what to do. `code`: the exit status."""

    code = 2


class NonFiniteLogits(Exception):
    """A model produced NaN or infinite logits. No token drawn from them is ever emitted."""


def first_line(e: BaseException) -> str:
    """The first line of an exception's message, with the second if it ends in a colon; its type if
    the message is empty."""
    first, *more = str(e).strip().splitlines() or [type(e).__name__]
    return f"{first} {more[0].strip()}" if more and first.endswith(":") else first


def ran_out(message: str) -> bool:
    """Whether this is the message of the RuntimeError torch raises when CPU memory runs out."""
    return "not enough memory" in message or "can't allocate memory" in message
