"""The two errors a run may end with; any other exception is a bug."""

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """Bad input. The message is one line: what is wrong and what to do. `code`: the exit status."""

    code = 2


class NonFiniteLogits(Exception):
    """A model produced NaN or infinite logits. No token drawn from them is ever emitted."""


def panicked(e: BaseException) -> bool:
    """Whether a library in Rust panicked, mostly over its input: that is no Exception."""
    return type(e).__name__ == "PanicException"


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Raise a UserError that begins with `what` for whatever a library raises over bad input."""
    try:
        yield
    except UserError:
        raise
    except BaseException as e:
        if not (isinstance(e, Exception) or panicked(e)):
            raise
        raise UserError(f"{what}: {first_line(e)}") from e


def first_line(e: BaseException) -> str:
    """The first line of an exception's message, with the second if it ends in a colon; its type if
    the message is empty."""
    first, *more = str(e).strip().splitlines() or [type(e).__name__]
    if isinstance(e, KeyError):  # its message is the key alone
        first = f"there is no {first}"
    return f"{first.rstrip()} {more[0].strip()}" if more and first.rstrip().endswith(":") else first


def ran_out(message: str) -> bool:
    """Whether this is the message of the RuntimeError torch raises when CPU memory runs out."""
    return "not enough memory" in message or "can't allocate memory" in message
