"""What the commands share: options, the console, and checks of what is given on a command line."""

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from specexp.errors import UserError
from specexp.measure.parameters import PARAMETERS, help_of
from specexp.terminal import Terminal, harmless

console = Terminal(markup=False, emoji=False, highlight=False)  # messages are not markup
PANELS = {  # of --help, and the parameters in each
    "Models": ("target", "drafter", "dtype", "device"),
    "Drafting": ("gamma", "tree", "rule", "policy"),
    "Sampling": ("temperature", "top_k", "top_p", "min_p", "sampling", "seed"),
    "Prompts": ("prompts", "limit", "chat", "max_new_tokens"),
}
MEANT = {"generate": "--prompt", "serve": "--load", "profile": "--target", "train": "--target"}


class Command(TyperCommand):
    """A command that names the option which a word without one was meant for."""

    allow_extra_args = True  # checked here

    def invoke(self, ctx: Any) -> Any:
        if ctx.args:
            words, option = shlex.join(ctx.args), MEANT.get(ctx.info_name)
            if option == "--prompt" and os.path.exists(ctx.args[0]):
                option = "--prompts"
            instead = f"did you mean {option} {words}?" if option else "leave it out"
            raise UserError(f"{ctx.command_path} takes no argument such as {words}: {instead}")
        return super().invoke(ctx)


def option(name: str, more: str = "", value: Any = ..., *flags: str) -> Any:
    """The option for a parameter, explained as notebooks explain it. `more`: sentences after it;
    `value`: its default, where that is another than the table's."""
    panel = next((panel for panel, names in PANELS.items() if name in names), None)
    value = PARAMETERS[name].default if value is ... else value
    return typer.Option(value, *flags, help=help_of(name, more), rich_help_panel=panel)


def own(help: str, value: Any = None, *flags: str) -> Any:
    """An option of one command, with its default value (...: it must be given); a bool needs the
    flag that sets it."""
    return typer.Option(value, *flags, help=help)


TARGET = option("target", "NAME+int8: with 8-bit weights.")
DRAFTER = option("drafter", "`model` is the target's draft in the zoo.")
GAMMA = option("gamma", "Default: 5, or the drafter's longest if shorter.")
TEMPERATURE = option("temperature")
CHAT = option("chat", "", False, "--chat")
SAMPLING = option("sampling", "`do_sample` false is greedy.")
MAX_NEW_TOKENS = option("max_new_tokens")
DTYPE = option("dtype")
DEVICE = option("device")
SEED = option("seed")
AS_JSON = own("Print JSON instead of text.", False, "--json")
PAIRING = ("target", "drafter", "gamma", "tree", "temperature", "top_k", "top_p", "min_p",
           "sampling", "rule", "dtype", "device", "seed")  # fmt: skip


def pairing_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options for `specexp.load`: of what a command was given those of PAIRING, the usual gamma if
    it is None, and the table's defaults of the others."""
    from specexp import api

    options = {name: given.get(name, PARAMETERS[name].default) for name in PAIRING}
    if options["gamma"] is None:
        options["gamma"] = api.usual_gamma(api.DEFAULTS | options)
    return options


def say(*parts: Any) -> None:
    """Print parts below each other; lines that are too long for the terminal are not broken."""
    console.print(*parts, sep="\n", soft_wrap=True)


def numbers(name: str, listed: str) -> list[int]:
    """The whole numbers of a list such as "1,2,4"."""
    try:
        return [int(n) for n in listed.split(",")]
    except ValueError:
        raise UserError(f"{name} {listed!r}: give whole numbers such as 1,2,4") from None


def picture_beside(out: Path) -> Path:
    """The path of the figure beside `out`. Raises UserError if `out` cannot be written."""
    if out.suffix == ".png":
        raise UserError(f"{out} would be overwritten by the figure: choose another extension")
    check_writable(out)
    return out.with_suffix(".png")


def check_writable(out: Path) -> None:
    """Raises UserError if the file cannot be written; its content is not touched."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        new = not out.exists()
        out.open("a").close()
        if new:
            out.unlink()
    except OSError as e:
        raise UserError(f"cannot write {out}: {e.strerror}; choose another file") from e


def relative(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def json_text(value: Any) -> str:
    """JSON, with null for what is no number, in which characters that could act on a terminal are
    escaped."""
    value = json.loads(json.dumps(value), parse_constant=lambda _: None)
    text = json.dumps(value, ensure_ascii=False)
    return "".join(x if harmless(x) == x else f"\\u{ord(x):04x}" for x in text)


def complain(what: str, line: str) -> None:
    """Print a line on stderr: what kind of message it is, in red, and the message."""
    from rich.text import Text

    text = Text.assemble((what, "bold red"), f": {line}")
    Terminal(stderr=True).print(text, soft_wrap=True)
