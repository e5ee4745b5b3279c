"""The ``trueup`` command.

Its subcommands are the entry points of the group ``trueup.commands``, so each installed distribution brings
its own.  An entry point names a module with the three members of :class:`Command`.
"""
import argparse
import ast
import os
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

GROUP = "trueup.commands"
USER_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141  # 128 + the signal's number, as shells report it


class Command(Protocol):
    """A subcommand: one line of help, its arguments, and what it does."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code.

    What a user got wrong (ValueError, ContractError included) ends in a message and exit code 2, without a
    traceback; anything else is a bug and shows one.
    """
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()  # so that a closed pipe shows here, not while the interpreter shuts down
    except ValueError as error:
        print(f"trueup: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing left to flush at shutdown
        return BROKEN_PIPE


def _run(argv: list[str]) -> int:
    commands = {point.name: point for point in sorted(entry_points(group=GROUP), key=lambda point: point.name)}
    parser = argparse.ArgumentParser(
        prog="trueup", description="A small LLM serving core for Ascend NPUs, which also runs on a laptop.",
        epilog="Packages bring their own commands: install trueup-server for all of them.",
    )
    parser.add_argument("--version", action="version", version=f"trueup {version('trueup-core')}")
    choices = parser.add_subparsers(title="commands", metavar="<command>", required=True)
    parsers = {name: choices.add_parser(name, help=help_text(point)) for name, point in commands.items()}
    # trueup itself has no option that takes a value, so the first word is the command.  Only that one is
    # imported: most of them import torch.
    chosen = next((word for word in argv if not word.startswith("-")), None)
    if chosen in commands:
        command = _import(commands[chosen])
        parsers[chosen].description = command.HELP
        command.add_arguments(parsers[chosen])
        parsers[chosen].set_defaults(run=command.run)
    args = parser.parse_args(argv)
    return args.run(args)


def _import(point: EntryPoint) -> Any:
    try:
        return point.load()
    except ModuleNotFoundError as error:
        home = point.dist.name if point.dist else point.module
        raise ValueError(f"{point.name}: {error}; is everything that {home} needs installed?") from error


def help_text(point: EntryPoint) -> str:
    """HELP of a command's module, read from its source without running it; '' where there is none."""
    top, *rest = point.module.split(".")
    spec = find_spec(top)
    for folder in (spec and spec.submodule_search_locations) or ():
        source = Path(folder, *rest).with_suffix(".py")
        if not source.is_file():
            continue
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            match node:
                case ast.Assign(targets=[ast.Name(id="HELP")], value=ast.Constant(value=str(text))):
                    return text
    return ""


if __name__ == "__main__":
    sys.exit(main())
