"""From the command line to raw values: flags generated from the schema, all problems collected."""

from __future__ import annotations

import argparse
import difflib
import math
from argparse import SUPPRESS
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NoReturn

from megatron_overlap.config.errors import ConfigError
from megatron_overlap.config.known_flags import KnownFlag, Verdict, family_reason, known_flags
from megatron_overlap.config.options import Form, Need, Option, main_flag, off_flags, on_flags
from megatron_overlap.config.schema import all_fields, bare_type

_GIVEN = "_given"  # where the namespace keeps the values of our own flags, apart from the user's arguments

ExtraArguments = Callable[[argparse.ArgumentParser], object]


@dataclass
class RawArguments:
    """What the command line says: values of the fields that were given, and everything to remark on."""

    values: dict[str, Any] = field(default_factory=dict)
    spellings: dict[str, list[str]] = field(default_factory=dict)  # field -> flags that gave it, in order
    broken: set[str] = field(default_factory=set)  # fields with a value that cannot be used
    extra: dict[str, Any] = field(default_factory=dict)
    dump_config: bool = False
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def read_arguments(
    argv: Sequence[str], *, extra_args: ExtraArguments | None, extra_defaults: Mapping[str, Any]
) -> RawArguments:
    """Parse the command line without stopping at the first problem."""
    parser = build_parser(extra_args)
    parser.set_defaults(**extra_defaults)
    raw = RawArguments()
    namespace, unknown = _parse_leniently(parser, _attach_negative_numbers(argv), raw)
    given: dict[str, list[tuple[str, Any]]] = vars(namespace).pop(_GIVEN)
    raw.dump_config = vars(namespace).pop("dump_config")
    _take_fields(given, raw)
    _judge_known(given, raw)
    _judge_unknown(unknown, parser.spellings(), raw)
    raw.extra = vars(namespace)
    return raw


def build_parser(extra_args: ExtraArguments | None = None) -> CollectingParser:
    """Make the parser of all flags; `extra_args` adds the user's own."""
    parser = CollectingParser(
        prog="pretrain_gpt.py", allow_abbrev=False, exit_on_error=False, description="Train a GPT model."
    )
    groups: dict[str, Any] = {}
    for group_name, name, hint, described in all_fields():
        if described.need is Need.INTERNAL:
            continue
        if group_name not in groups:
            groups[group_name] = parser.add_argument_group(group_name)
        _add_field(groups[group_name], name, hint, described)
    parser.add_argument("--dump-config", action="store_true", help="Print the resolved configuration and exit.")
    if extra_args is not None:
        _add_extra(parser, extra_args)
    taken = set(parser.spellings())
    for known in known_flags():
        if known.flag not in taken:
            record: dict[str, Any] = {"action": _Record, "default": SUPPRESS, "help": SUPPRESS}
            parser.add_argument(known.flag, dest=known.flag, nargs=known.nargs, **record)
    return parser


class CollectingParser(argparse.ArgumentParser):
    """A parser whose errors are raised, never printed."""

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)

    def spellings(self) -> list[str]:
        """Return every flag that the parser knows."""
        return list(self._option_string_actions)

    def forget_requirements(self) -> None:
        """Let a second parse pass that lacks required arguments."""
        for action in self._actions:
            action.required = False
        self._mutually_exclusive_groups.clear()


class _Record(argparse.Action):
    """Keep each value together with the flag that gave it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        value = self.const if self.nargs == 0 else values
        vars(namespace)[_GIVEN].setdefault(self.dest, []).append((option_string, value))


def _add_extra(parser: CollectingParser, extra_args: ExtraArguments) -> None:
    try:
        extra_args(parser)
    except argparse.ArgumentError as error:
        raise ConfigError([f"extra_args, {error}; choose another name"]) from error


def _add_field(group: Any, name: str, hint: Any, described: Option) -> None:
    kind = bare_type(hint)
    help_text = _help(described)
    common: dict[str, Any] = {"dest": name, "action": _Record, "default": SUPPRESS}
    if kind is bool and described.form is Form.PLAIN:
        shown = SUPPRESS if described.default else help_text
        group.add_argument(*on_flags(name, described), nargs=0, const=True, help=shown, **common)
        if off := off_flags(name, described):
            group.add_argument(
                *off, nargs=0, const=False, help=f"Switch this off: {_in_a_sentence(help_text)}", **common
            )
        return
    is_list = _is_tuple(kind) and described.form is Form.PLAIN
    convert = _converter(kind, described)
    extent: dict[str, Any] = {"nargs": "*"} if is_list else {}
    flags = on_flags(name, described)
    group.add_argument(*flags, type=convert, metavar=_metavar(kind, described), help=help_text, **extent, **common)
    for flag, text in described.spelling.constants.items():
        group.add_argument(flag, nargs=0, const=convert(text), help=f"The same as {flags[0]} {text}.", **common)


def _help(described: Option) -> str:
    text = described.help.replace("%", "%%")
    if described.form is Form.ON_OFF:
        return f"{text} Default: {'on' if described.default else 'off'}."
    plain = described.default is None or described.default == () or isinstance(described.default, bool)
    return text if plain else f"{text} Default: {described.default}."


def _in_a_sentence(text: str) -> str:
    """With a small first letter, unless it begins a name that has more capitals."""
    first, second = text[:1], text[1:2]
    return text if second.isupper() or text.startswith("Megatron") else first.lower() + text[1:]


def _metavar(kind: Any, described: Option) -> str:
    if described.form is Form.ON_OFF:
        return "{on,off}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "{" + ",".join(_words(kind, described)) + "}"
    if described.form is Form.COMMAS:
        return "N,N"
    return {int: "N", float: "X"}.get(kind, "TEXT")


def _words(kind: type[Enum], described: Option) -> list[str]:
    return [member.value for member in kind if member.value not in described.refused]


def _is_tuple(kind: Any) -> bool:
    return getattr(kind, "__origin__", None) is tuple


def _converter(kind: Any, described: Option) -> Callable[[str], Any]:
    if described.form is Form.ON_OFF:
        return _on_off
    if described.form is Form.COMMAS:
        return lambda text: tuple(_number(int, part, described) for part in text.split(","))
    if kind in (int, float):
        return lambda text: _number(kind, text, described)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return lambda text: _member(kind, text, described)
    return str


def _on_off(text: str) -> bool:
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"found {text!r}; use on or off")
    return text == "on"


def _number(kind: type[int] | type[float], text: str, described: Option) -> int | float:
    try:
        value = kind(text)
    except ValueError:
        word = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"found {text!r}, which is not {word}") from None
    problem = described.limit.problem(value) if math.isfinite(value) else "must be finite"
    if problem:
        raise argparse.ArgumentTypeError(f"{problem}, found {text}")
    return value


def _member(kind: type[Enum], text: str, described: Option) -> Enum:
    if text in described.refused:
        raise argparse.ArgumentTypeError(f"{text}: {described.refused[text]}")
    try:
        return kind(text)
    except ValueError:
        words = _words(kind, described)
        close = difflib.get_close_matches(text.lower(), [word.lower() for word in words], n=1)
        meant = next((f"; did you mean {word}?" for word in words if [word.lower()] == close), "")
        raise argparse.ArgumentTypeError(f"found {text!r}, choose from {', '.join(words)}{meant}") from None


def _attach_negative_numbers(argv: Sequence[str]) -> list[str]:
    """Join `--lr -1e-3` to `--lr=-1e-3`: argparse takes such a number for a flag."""
    joined: list[str] = []
    for token in argv:
        previous = joined[-1] if joined else ""
        if token.startswith("-") and _is_number(token) and previous.startswith("--") and "=" not in previous:
            joined[-1] = f"{previous}={token}"
        else:
            joined.append(token)
    return joined


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _parse_leniently(
    parser: CollectingParser, argv: list[str], raw: RawArguments
) -> tuple[argparse.Namespace, list[str]]:
    """Parse again and again, each time without the argument that was refused."""
    while True:
        try:
            return parser.parse_known_args(argv, argparse.Namespace(**{_GIVEN: {}}))
        except argparse.ArgumentError as error:
            if error.argument_name is None:
                raw.errors.append(error.message)
                parser.forget_requirements()
                continue
            flags = error.argument_name.split("/")
            argv, used = _without(argv, flags)
            raw.errors.append(f"{used}: {error.message}")
            raw.broken.update(_fields_of(flags))


def _without(argv: list[str], flags: list[str]) -> tuple[list[str], str]:
    """Drop the flags with their values, and name the one that was used."""
    kept: list[str] = []
    used = flags[0]
    dropping = False
    for token in argv:
        if token.startswith("--"):
            flag = token.split("=", 1)[0]
            dropping = flag in flags
            used = flag if dropping else used
        if not dropping:
            kept.append(token)
    assert len(kept) < len(argv), (flags, argv)
    return kept, used


def _fields_of(flags: list[str]) -> set[str]:
    declared = _declared_flags()
    return {declared[flag] for flag in flags if flag in declared}


def _declared_flags() -> dict[str, str]:
    """Map every flag of the schema to its field."""
    flags: dict[str, str] = {}
    for _, name, _, described in all_fields():
        if described.need is not Need.INTERNAL:
            spelled = (*on_flags(name, described), *off_flags(name, described), *described.spelling.constants)
            flags.update(dict.fromkeys(spelled, name))
    return flags


def _take_fields(given: Mapping[str, list[tuple[str, Any]]], raw: RawArguments) -> None:
    for _, name, _, described in all_fields():
        uses = given.get(name, [])
        if not uses:
            continue
        value = uses[-1][1]
        words = value if isinstance(value, list) else [value]
        if any(isinstance(word, str) and not word.strip() for word in words):
            raw.errors.append(f'{uses[-1][0]} "" is empty: is a variable of the script not set?')
            raw.broken.add(name)
            continue
        raw.values[name] = tuple(value) if isinstance(value, list) else value
        raw.spellings[name] = [flag for flag, _ in uses]
        for flag in dict.fromkeys(raw.spellings[name]):
            if flag in described.spelling.old:
                raw.warnings.append(f"{flag} is an old spelling of {main_flag(name, described)}")


def _judge_known(given: Mapping[str, list[tuple[str, Any]]], raw: RawArguments) -> None:
    for known in known_flags():
        if known.flag in given:
            _judge_one(known, given[known.flag][-1][1], raw)


def _judge_one(known: KnownFlag, value: Any, raw: RawArguments) -> None:
    words = [str(word) for word in value] if isinstance(value, list) else []
    if known.values and words and all(word in known.values for word in words):
        if known.flag == "--ckpt-format":
            raw.warnings.append(
                f"--ckpt-format {words[0]}: checkpoints are written as safetensors, in this project's own layout"
            )
        return
    spelled = " ".join([known.flag, *words[:1]]) if known.values else known.flag
    if known.verdict is Verdict.REFUSED:
        raw.errors.append(f"{spelled}: {known.reason}")
        raw.broken.update(_required_fields_in(known.reason) - set(raw.values))
    elif known.verdict is Verdict.WARNED:
        raw.warnings.append(f"{spelled} changes nothing: {known.reason}")


def _required_fields_in(reason: str) -> set[str]:
    """Return the required fields whose flags a reason names: whoever is told to use them need not hear it twice."""
    words = reason.replace(",", " ").replace(";", " ").split()
    return {
        name
        for _, name, _, described in all_fields()
        if described.need is Need.REQUIRED and set(on_flags(name, described)) & set(words)
    }


def _judge_unknown(unknown: Sequence[str], candidates: Sequence[str], raw: RawArguments) -> None:
    declared = _declared_flags()
    after_unknown_flag = False
    for token in unknown:
        if token.startswith("-") and len(token) > 1 and not _is_number(token):
            after_unknown_flag = True
            flag = token.split("=", 1)[0]
            meant = None if family_reason(flag) else _closest(flag, candidates)
            question = f"; did you mean {meant}?" if meant else ""
            raw.errors.append(f"{flag}: {family_reason(flag) or 'unknown flag' + question}")
            if meant in declared and declared[meant] not in raw.values:
                raw.broken.add(declared[meant])
        elif not after_unknown_flag:
            raw.errors.append(f"{token!r}: no flag takes this value")


def _closest(flag: str, candidates: Sequence[str]) -> str | None:
    normal = {candidate.lower().replace("_", "-"): candidate for candidate in reversed(candidates)}
    wanted = "--" + flag.lower().lstrip("-").replace("_", "-")
    close = difflib.get_close_matches(wanted, normal, n=1, cutoff=0.75)
    return normal[close[0]] if close else None
