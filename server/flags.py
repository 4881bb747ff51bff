"""The command line of `outrider serve`, made from the settings tree: grouped help, no abbreviations."""

from __future__ import annotations

import argparse
import io
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args, get_origin

import yaml

from server.config import Settings, flag_name, flag_of
from server.config_draft_keys import DRAFT_KEYS
from server.config_faults import UsageError, nearest
from server.config_flag import GROUP_TITLES
from server.config_sources import resolve
from server.config_speculative import FLAG as DRAFT_FLAG
from server.config_speculative import SETTING as DRAFT_SETTING
from server.config_speculative import nearest_key
from server.sizes import format_size
from server.spec.settings import SpeculativeSettings

_DESCRIPTION = """\
Serve a model over the OpenAI API.

Every flag is also a variable (--max-num-seqs is OUTRIDER_MAX_NUM_SEQS) and a key of the --config file
(max_num_seqs). A flag is stronger than a variable, a variable stronger than the file."""

_CHECK_DESCRIPTION = """\
Show what `outrider serve` would build with the same flags, without loading weights: every component of the target and
of the draft, what was asked for, what it becomes and why, and what could not serve. The exit code is 1 when the server
could not start."""


@dataclass(frozen=True)
class ServeCommand:
    """What `outrider serve` was asked to do."""

    settings: Settings
    print_config: bool


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ours to print."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"{message} (see {self.prog} --help)")

    def parse_known(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse `argv`, refusing what is unknown with the nearest right flag.

        Raises:
            UsageError: an unknown flag, a flag without its value, an argument too many.
        """
        namespace, unknown = self.parse_known_args(argv)
        for argument in unknown:
            if argument.startswith("-"):
                name = argument.split("=")[0]
                known = [option for option in self._option_string_actions if option.startswith("--")]
                hint = nearest(name.replace("_", "-"), [option for option in known if "." not in option])
                if name.startswith(DRAFT_FLAG + "."):
                    hint = nearest_key(name.removeprefix(DRAFT_FLAG + "."))
                if name == "--model":
                    hint = "; the model is given without a flag, as in `outrider serve MODEL`"
                raise UsageError(f"unknown flag {name}{hint}")
        if unknown:
            raise UsageError(f"unexpected argument {unknown[0]!r} (see {self.prog} --help)")
        return namespace


@dataclass(frozen=True)
class CheckCommand:
    """What `outrider check` was asked to do."""

    settings: Settings
    as_json: bool


def serve_parser() -> Parser:
    """The parser of `outrider serve`; nothing given means nothing in the namespace."""
    parser, other = settings_parser("serve", _DESCRIPTION)
    other.add_argument("--print-config", action="store_true", help="Print the resolved settings as YAML and exit.")
    return parser


def check_parser() -> Parser:
    """The parser of `outrider check`: the settings of `outrider serve`."""
    parser, other = settings_parser("check", _CHECK_DESCRIPTION)
    other.add_argument("--json", action="store_true", help="Print the report as JSON.")
    return parser


def settings_parser(command: str, description: str) -> tuple[Parser, argparse._ArgumentGroup]:
    """A parser with all settings, and the group that takes the command's own flags."""
    parser = Parser(
        prog=f"outrider {command}",
        usage=f"outrider {command} [MODEL] [flags]",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
    )
    groups = {group: parser.add_argument_group(title) for group, title in GROUP_TITLES.items()}
    for name in Settings.model_fields:
        _add(groups[flag_of(name).group], name)
    for name, key in DRAFT_KEYS.items():
        groups["draft"].add_argument(
            f"{DRAFT_FLAG}.{name}", dest=f"{DRAFT_SETTING}.{name}", metavar=key.metavar, help=key.help
        )
    other = parser.add_argument_group("settings and help")
    other.add_argument("--config", metavar="FILE", help="Read settings from this YAML file (also OUTRIDER_CONFIG).")
    other.add_argument("-h", "--help", action="help", help="Show this help and exit.")
    return parser, other


def parse_serve(argv: Sequence[str]) -> ServeCommand:
    """The settings that the flags in `argv`, the variables and the file resolve to.

    Raises:
        UsageError: something in one of them is no setting or has an impossible value.
    """
    given = given_settings(serve_parser(), argv)
    print_config = given.pop("print_config", False)
    return ServeCommand(resolved_settings(given), print_config)


def parse_check(argv: Sequence[str]) -> CheckCommand:
    """The same for `outrider check`.

    Raises:
        UsageError: as for `parse_serve`.
    """
    given = given_settings(check_parser(), argv)
    as_json = given.pop("json", False)
    return CheckCommand(resolved_settings(given), as_json)


def given_settings(parser: Parser, argv: Sequence[str]) -> dict[str, Any]:
    """What `argv` gives to a `settings_parser`, the command's own flags among it.

    Raises:
        UsageError: an unknown flag, a flag without its value, an argument too many.
    """
    return vars(parser.parse_known(_plain_keys(argv)))


def resolved_settings(given: dict[str, Any]) -> Settings:
    """The settings that such flags, the variables and the file resolve to.

    Raises:
        UsageError: something in one of them is no setting or has an impossible value.
    """
    return resolve(given, given.pop("config", None))


def _plain_keys(argv: Sequence[str]) -> list[str]:
    """--speculative-config.moe-backend is --speculative-config.moe_backend."""
    plain = []
    for argument in argv:
        flag, equals, value = argument.partition("=")
        if flag.startswith(DRAFT_FLAG + "."):
            flag = f"{DRAFT_FLAG}.{flag.removeprefix(DRAFT_FLAG + '.').replace('-', '_')}"
        plain.append(flag + equals + value)
    return plain


def config_yaml(settings: Settings) -> str:
    """The resolved tree as YAML that --config takes back.

    API keys are secrets and are left out; a comment says how many there are.
    """
    values = settings.model_dump(exclude={"api_key"})
    if settings.kv_cache_memory is not None:
        values["kv_cache_memory"] = format_size(settings.kv_cache_memory)
    values[DRAFT_SETTING] = _draft_values(settings.speculative)
    out = io.StringIO()
    for group, title in GROUP_TITLES.items():
        out.write(f"# {title}\n")
        members = {name: value for name, value in values.items() if flag_of(name).group == group}
        out.write(yaml.safe_dump(members, sort_keys=False, allow_unicode=True))
        if group == "server" and settings.api_key:
            out.write(
                f"# api_key: {len(settings.api_key)} given and not printed; set OUTRIDER_API_KEY beside this file\n"
            )
    return out.getvalue()


def _draft_values(draft: SpeculativeSettings | None) -> dict[str, Any] | None:
    if draft is None:
        return None
    values = draft.model_dump(exclude_none=True)
    rules = draft.num_speculative_tokens_per_batch_size
    if rules is not None:
        values["num_speculative_tokens_per_batch_size"] = [[rule.lo, rule.hi, rule.k] for rule in rules]
    return values


def _add(group: argparse._ArgumentGroup, name: str) -> None:
    field, flag = Settings.model_fields[name], flag_of(name)
    default = flag.unset if flag.unset is not None else _text(field.default)
    text = f"{flag.help} [default: {default}]".replace("%", "%%")
    if flag.positional:
        group.add_argument(name, nargs="?", metavar=flag.metavar, help=text)
    elif field.annotation is bool:
        group.add_argument(flag_name(name), dest=name, action=argparse.BooleanOptionalAction, help=text)
    elif flag.repeated:
        group.add_argument(flag_name(name), dest=name, action="append", metavar=flag.metavar, help=text)
    else:
        group.add_argument(flag_name(name), dest=name, metavar=flag.metavar or _choices(field.annotation), help=text)


def _text(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, float) and default.is_integer():
        return str(int(default))
    return str(default) if default != "" else "none"


def _choices(annotation: Any) -> str | None:
    if get_origin(annotation) is types.UnionType:
        annotation = get_args(annotation)[0]
    return "|".join(get_args(annotation)) if get_origin(annotation) is Literal else None
