"""Prints a script that lets a shell complete the words of `offbeat`: `eval "$(offbeat completion bash)"`.

The script is made from the arguments of all commands, so that it never lags behind them. It asks nothing at the time of
completion, except for the names of files.
"""

import argparse
from collections.abc import Iterator
from typing import Literal, NamedTuple

Shell = Literal["bash", "zsh", "fish"]
SHELLS: tuple[Shell, ...] = ("bash", "zsh", "fish")


class Words(NamedTuple):
    """What may stand behind a command."""

    command: str
    """Command, or command and action, as it is typed: "train", "keys make"."""
    help: str
    words: tuple[str, ...]
    """Options, choices of a position, and actions."""


def words_of(parser: argparse.ArgumentParser, command: str = "", text: str = "") -> Iterator[Words]:
    """Yield the words behind a command, then those behind its actions.

    Example:
        >>> parser = argparse.ArgumentParser()
        >>> _ = parser.add_argument("--fast", action="store_true")
        >>> _ = parser.add_argument("shape", choices=("round", "flat"))
        >>> next(words_of(parser, "draw")).words
        ('--help', '--fast', 'round', 'flat')
    """
    words: list[str] = []
    below: list[tuple[str, str, argparse.ArgumentParser]] = []
    for action in parser._actions:
        if action.option_strings:
            words.append(max(action.option_strings, key=len))
        elif isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._get_subactions()}
            below += [(name, helps.get(name, ""), inner) for name, inner in action.choices.items()]
            words += action.choices
        elif action.choices:
            words += [str(choice) for choice in action.choices]
    yield Words(command, text, tuple(dict.fromkeys(words)))
    for name, said, inner in below:
        yield from words_of(inner, f"{command} {name}".strip(), said)


def script(parser: argparse.ArgumentParser, shell: Shell, recipes: tuple[str, ...] = ()) -> str:
    """Return the script for a shell.

    Args:
        recipes: names that commands with a run file take beside files.
    """
    entries = [
        entry._replace(words=(*entry.words, *(recipes if _reads_run_file(parser, entry.command) else ())))
        for entry in words_of(parser)
    ]
    return _fish(entries) if shell == "fish" else _bash(entries, zsh=shell == "zsh")


def _reads_run_file(parser: argparse.ArgumentParser, command: str) -> bool:
    """Return whether a command has a run file among its arguments."""
    found = parser
    for word in command.split():
        (sub,) = (a for a in found._actions if isinstance(a, argparse._SubParsersAction))
        found = sub.choices[word]
    return any(action.dest == "run_file" for action in found._actions)


def _bash(entries: list[Words], *, zsh: bool) -> str:
    """Return the script for bash, which zsh reads with its own layer for bash."""
    cases = [f'        "{entry.command}") words="{" ".join(entry.words)}" ;;' for entry in entries]
    head = ["autoload -U +X bashcompinit && bashcompinit"] if zsh else []
    return "\n".join(
        [
            *head,
            "_offbeat() {",
            '    local word="${COMP_WORDS[COMP_CWORD]}" command="" words="" i',
            "    for ((i = 1; i < COMP_CWORD; i++)); do",
            '        case "${command:+$command }${COMP_WORDS[i]}" in',
            f"            {'|'.join(_quoted(entry.command) for entry in entries if entry.command)})",
            '                command="${command:+$command }${COMP_WORDS[i]}" ;;',
            "        esac",
            "    done",
            '    case "$command" in',
            *cases,
            "    esac",
            '    COMPREPLY=($(compgen -W "$words" -- "$word") $(compgen -f -- "$word"))',
            "}",
            "complete -o filenames -F _offbeat offbeat",
            "",
        ]
    )


def _quoted(command: str) -> str:
    return f'"{command}"'


def _fish(entries: list[Words]) -> str:
    lines = []
    for entry in entries:
        seen = " ".join(f"__fish_seen_subcommand_from {word};" for word in entry.command.split())
        when = seen.replace("; __", "; and __").rstrip(";") or "__fish_use_subcommand"
        for word in entry.words:
            option = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            lines.append(f"complete -c offbeat -n '{when}' {option}")
    return "\n".join(lines) + "\n"
