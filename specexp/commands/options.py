"""What the commands share: options, the console, and checks of what is given on a command line."""

import itertools
import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from specexp.errors import UserError, meant
from specexp.measure.parameters import PARAMETERS, help_of
from specexp.terminal import Terminal, harmless

console = Terminal(markup=False, emoji=False, highlight=False)  # messages are not markup
PANELS = {  # of --help, and the parameters in each
    "Models": ("target", "drafter", "dtype", "device"),
    "Drafting": ("gamma", "tree", "rule"),
    "Sampling": ("temperature", "top_k", "top_p", "min_p", "sampling", "seed"),
    "Prompts": ("prompts", "limit", "chat", "max_new_tokens"),
}
MEANT = {"generate": "--prompt", "serve": "--load", "profile": "--target", "train": "--target"}


USAGE: Any = typer.BadParameter.__bases__[0]  # what typer raises over a command line
TYPES = {  # as typer shows them: what stands for a value in --help, and what a wrong one is not
    "<bool>": ("", ""), "<str>": ("TEXT", ""), "<path>": ("PATH", ""),
    "<list[str]>": ("TEXT...", ""), "<int>": ("NUMBER", "a whole number"),
    "<float>": ("NUMBER", "a number"),
}  # fmt: skip
WAYS = {"version": "specexp --version", "help": "specexp -h"}


def _type(param: Any, ctx: Any) -> tuple[str | None, str]:
    return TYPES.get(param.display_type(ctx), (None, "")) if param else (None, "")


class _Page:
    """What commands and groups share: one-line errors, and help without Python's types."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if param.param_type_name == "argument":
                param.display_type_rich = lambda ctx: None  # its name says it
            elif param.metavar is None:
                param.metavar = _type(param, ctx)[0]
                param.secondary_opts = []  # a flag has no --no-flag
        return params

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        words = " ".join(args).replace("=", " ").split()
        try:
            return super().parse_args(ctx, args)  # type: ignore[misc]
        except USAGE as e:
            param: Any = getattr(e, "param", None)
            _, number = _type(param, ctx)
            for option, value in itertools.pairwise(words):
                if number and option in param.opts:
                    raise UserError(f"{option} {value!r} is not {number}") from None
            raise UserError(" ".join(e.format_message().split()).rstrip(".")) from None


class Group(_Page, TyperGroup):
    """A group of commands that suggests the command that was probably meant."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        return super().parse_args(ctx, [] if args == ["--"] else args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if (name := args[0]) in self.commands:
            return super().resolve_command(ctx, args)
        every = f" (there are {', '.join(self.commands)})"
        near = f": {WAYS[name]}" if name in WAYS else meant(name, self.commands, every)
        raise UserError(f"{ctx.command_path} has no command {name!r}{near}")


class Command(_Page, TyperCommand):
    """A command that suggests the option for an argument that stands without one, and knows a home
    folder where a shell does not (`--out=~/table.csv`)."""

    allow_extra_args = True  # checked here

    def invoke(self, ctx: Any) -> Any:
        if ctx.args:
            words, option = shlex.join(ctx.args), MEANT.get(ctx.info_name)
            if option == "--prompt" and os.path.exists(ctx.args[0]):
                option = "--prompts"
            instead = f"did you mean {option} {words}?" if option else "leave it out"
            raise UserError(f"{ctx.command_path} takes no argument such as {words}: {instead}")
        for name, value in ctx.params.items():
            if isinstance(value, Path):
                ctx.params[name] = Path(os.path.expanduser(value))
        return super().invoke(ctx)


def option(name: str, more: str = "", value: Any = ...) -> Any:
    """The option for a parameter, with the table's help. `more`: sentences to add to the help;
    `value`: its default, if it differs from the table's."""
    panel = next((panel for panel, names in PANELS.items() if name in names), None)
    value = PARAMETERS[name].default if value is ... else value
    return typer.Option(value, help=help_of(name, more), rich_help_panel=panel)


def own(help: str, value: Any = None) -> Any:
    """An option of one command, with its default value (...: it must be given)."""
    return typer.Option(value, help=help)


TARGET = option("target", "NAME+int8 has 8-bit weights.")
DRAFTER = option("drafter", "'model' is the zoo's draft for the target.")
GAMMA = option("gamma", "Default: 5, or the drafter's longest draft if shorter.")
TEMPERATURE = option("temperature")
CHAT = option("chat", "", False)
SAMPLING = option("sampling", "If do_sample is false there, decoding is greedy.")
MAX_NEW_TOKENS = option("max_new_tokens")
DTYPE = option("dtype", "float64 works too, without fast kernels.")
DEVICE = option("device")
SEED = option("seed")
AS_JSON = typer.Option(False, "--json", help="Print JSON instead of text.")
PAIRING = ("target", "drafter", "gamma", "tree", "temperature", "top_k", "top_p", "min_p",
           "sampling", "rule", "dtype", "device", "seed")  # fmt: skip


def pairing_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options for `specexp.load`: those of PAIRING as given, or by the table's defaults."""
    return {name: given.get(name, PARAMETERS[name].default) for name in PAIRING}


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


def print_json(value: Any) -> None:
    """Print JSON, null for what is no number, with escapes for what could act on a terminal."""
    value = json.loads(json.dumps(value), parse_constant=lambda _: None)
    text = json.dumps(value, ensure_ascii=False)
    print("".join(x if harmless(x) == x else f"\\u{ord(x):04x}" for x in text))


def complain(what: str, line: str) -> None:
    """Print a line on stderr: what kind of message it is, in red, and the message."""
    from rich.text import Text

    text = Text.assemble((what, "bold red"), f": {line}")
    Terminal(stderr=True).print(text, soft_wrap=True)
