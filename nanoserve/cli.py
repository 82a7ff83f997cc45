"""Flags, environment and YAML file become one `ServerConfig`: order CLI > environment > file > default.

Owner: the launcher (`nanoserve serve`, `python -m nanoserve.launch_server`); called once, before anything starts.
Nothing is listed here twice: names, types, defaults and help all come from the metadata in `nanoserve.config`.
Every mistake is a `ConfigError` with one line that names the flag, key or variable and, where there is one, the
name that was probably meant.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import re
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nanoserve.config import ServerConfig
from nanoserve.config_checks import check_config
from nanoserve.errors import ConfigError

EXIT_CODES = {0: "ended as asked", 1: "wrong configuration, or a part could not start"}
EXIT_CODES |= {70: "a process died", 75: "streams were cut: the drain timed out or a second signal came"}

_EPILOG = """\
Every flag is also a key of the --config file (max-num-seqs: 32) and a variable (NANOSERVE_MAX_NUM_SEQS=32).
A flag wins over a variable, a variable over the file. Sizes take k, m, g (1024) and kb, mb, gb (1000).

exit codes:
""" + "\n".join(f"  {code:<3} {meaning}" for code, meaning in EXIT_CODES.items())

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b?)", re.IGNORECASE)
_PREFIX = "NANOSERVE_"
_CONFIG_VARIABLE = f"{_PREFIX}CONFIG"
_BOOLS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Option:
    """One configuration field, seen as a flag, a YAML key and a variable."""

    section: str
    name: str  # max_num_seqs
    kind: type  # bool, int, float, str or tuple
    default: Any
    metadata: Mapping[str, Any]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return _PREFIX + self.name.upper()

    @property
    def names(self) -> list[str]:
        """The name and its aliases, all with dashes."""
        return [self.name.replace("_", "-"), *self.metadata["aliases"]]

    def parse(self, value: Any, where: str) -> Any:
        """Turns text or a YAML value into the field's type; ConfigError starts with `where`."""
        try:
            parsed = _convert(value, self.kind, size=self.metadata["size"])
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{where}: {error}") from None
        choices = self.metadata["choices"]
        if choices and parsed not in choices:
            raise ConfigError(f"{where}: {str(parsed)!r} is none of {', '.join(choices)}{_meant(str(parsed), choices)}")
        return parsed


def options() -> list[Option]:
    """All configuration fields in the order in which config.py declares them."""
    found = []
    for section in dataclasses.fields(ServerConfig):
        owner = typing.get_type_hints(ServerConfig)[section.name]
        hints = typing.get_type_hints(owner)
        for item in dataclasses.fields(owner):
            kind = typing.get_origin(hints[item.name]) or hints[item.name]
            found.append(Option(section.name, item.name, kind, item.default, item.metadata))
    return found


def parse_size(text: str) -> int:
    """`512MiB`, `4g`, `32k`, `1.5GB`, `4096`: a whole number; k, m, g, t and Ki.. count by 1024, kB.. by 1000."""
    match = _SIZE.fullmatch(text.strip().replace("_", ""))
    if match is None:
        raise ValueError(f"{text!r} is not a size (try 512MiB, 4g or 32k)")
    number, prefix, suffix = match.groups()
    base = 1000 if prefix and suffix.lower() == "b" else 1024
    value = float(number) * base ** " kmgt".index(prefix.lower() or " ")
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


def _convert(value: Any, kind: type, *, size: bool) -> Any:
    if kind is tuple:
        items = value if isinstance(value, list | tuple) else re.split(r"[,\s]+", str(value).strip())
        return tuple(str(item) for item in items if str(item))
    if isinstance(value, list | dict):
        raise ValueError(f"one value expected, not a {'list' if isinstance(value, list) else 'mapping'}")
    if kind is bool:
        word = str(value).strip().lower()
        if word not in _BOOLS:
            raise ValueError(f"{value!r} is neither true nor false")
        return _BOOLS[word]
    if kind is str:
        return str(value)
    if isinstance(value, bool):
        raise ValueError("a number expected, not true or false")
    if kind is int:
        return _whole_number(value, size=size)
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not a finite number")
    return number


def _whole_number(value: Any, *, size: bool) -> int:
    if isinstance(value, float):
        if value != int(value):
            raise ValueError(f"{value!r} is not a whole number")
        return int(value)
    if size and isinstance(value, str):
        return parse_size(value)
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a whole number") from None


def _meant(word: str, names: Sequence[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f" (did you mean {prefix}{close[0]}?)" if close else ""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError(message.removeprefix("argument "))


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=118)


def build_parser(prog: str = "nanoserve serve") -> argparse.ArgumentParser:
    """The parser behind --help. Values stay text here; `Option.parse` converts flags, variables and keys alike."""
    parser = _Parser(
        prog=prog, allow_abbrev=False, formatter_class=_Help, epilog=_EPILOG, usage="%(prog)s [MODEL] [options]"
    )
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file with the same names as the flags (or NANOSERVE_CONFIG)"
    )
    parser.add_argument("--print-config", action="store_true", help="show the resulting configuration and end")
    groups = {
        section.name: parser.add_argument_group(section.name, _summary(section.name))
        for section in dataclasses.fields(ServerConfig)
    }
    for item in options():
        _add_flag(groups[item.section], item)
    return parser


def _summary(section: str) -> str:
    owner = typing.get_type_hints(ServerConfig)[section]
    return (owner.__doc__ or "").strip().splitlines()[0]


def _add_flag(group: argparse._ArgumentGroup, item: Option) -> None:
    flags = ["--" + name for name in item.names]
    if item.kind is bool:
        shown = "on" if item.default else "off"
        help_text = f"{item.metadata['help']} [{shown}]"
        group.add_argument(*flags, dest=item.name, action=argparse.BooleanOptionalAction, default=None, help=help_text)
        return
    shown = " ".join(item.default) if item.kind is tuple else str(item.default)
    help_text = item.metadata["help"].replace("%", "%%") + (f" [{shown}]" if shown else "")
    metavar = item.metadata["metavar"] or (
        "{" + ",".join(item.metadata["choices"]) + "}" if item.metadata["choices"] else ""
    )
    metavar = metavar or {int: "SIZE" if item.metadata["size"] else "N", float: "X", tuple: "NAME"}.get(
        item.kind, "TEXT"
    )
    several: dict[str, Any] = {"nargs": "+", "action": "extend"} if item.kind is tuple else {}
    group.add_argument(*flags, dest=item.name, default=None, metavar=metavar, help=help_text, **several)


def _from_flags(argv: Sequence[str], prog: str) -> tuple[dict[str, Any], argparse.Namespace]:
    parser = build_parser(prog)
    known, unknown = parser.parse_known_args(list(argv))
    if unknown:
        word = unknown[0].split("=")[0]
        if not word.startswith("-"):
            raise ConfigError(f"unexpected argument {word!r}")
        flags = [flag for action in parser._actions for flag in action.option_strings]
        raise ConfigError(f"unknown flag {word}{_meant(word, flags)}")
    if known.positional_model is not None and known.model is not None:
        raise ConfigError("the model is given twice: as MODEL and as --model")
    values = {}
    for item in options():
        given = getattr(known, item.name)
        if item.name == "model" and given is None:
            given = known.positional_model
        if given is not None:
            values[item.name] = item.parse(given, item.flag)
    return values, known


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for item in options():
        text = environ.get(item.variable)
        # A Kubernetes service called "nanoserve" puts NANOSERVE_PORT=tcp://... into every container beside it.
        if text is None or (item.name == "port" and text.startswith("tcp://")):
            continue
        values[item.name] = item.parse(text, item.variable)
    return values


def unused_variables(environ: Mapping[str, str]) -> list[str]:
    """A line for each variable that looks like an option's and is none: misspelt, perhaps.

    Not for those that Kubernetes makes for a service called "nanoserve", or "nanoserve-" and more.
    """
    known = [item.name.upper() for item in options()] + [_CONFIG_VARIABLE.removeprefix(_PREFIX)]
    others = sorted({name.removeprefix(_PREFIX) for name in environ if name.startswith(_PREFIX)} - {*known})
    return [
        f"{_PREFIX}{name} names no option and is not used{_meant(name, known, _PREFIX)}"
        for name in others
        if not re.search(r"(^|_)(SERVICE_(HOST|PORT)(_|$)|PORT_\d+_(TCP|UDP)|PORT$)", name)
    ]


def _from_file(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {path}: a mapping of names to values expected")
    by_name = {name: item for item in options() for name in item.names}
    values: dict[str, Any] = {}
    for key, value in loaded.items():
        name = str(key).replace("_", "-")
        if name not in by_name:
            raise ConfigError(f"--config {path}: unknown key {str(key)!r}{_meant(name, list(by_name))}")
        item = by_name[name]
        if item.name in values:
            raise ConfigError(f"--config {path}: {name} is given twice")
        if value is not None:
            values[item.name] = item.parse(value, f"--config {path}: {key}")
    return values


def _build(values: Mapping[str, Any]) -> ServerConfig:
    hints = typing.get_type_hints(ServerConfig)
    sections: dict[str, dict[str, Any]] = {section.name: {} for section in dataclasses.fields(ServerConfig)}
    for item in options():
        if item.name in values:
            sections[item.section][item.name] = values[item.name]
    return ServerConfig(**{name: hints[name](**given) for name, given in sections.items()})


def dump_config(config: ServerConfig) -> str:
    """The configuration as a YAML file that --config reads back to the same tree."""
    lines = []
    for section in dataclasses.fields(ServerConfig):
        lines.append(f"# {section.name}: {_summary(section.name)}")
        for name, value in dataclasses.asdict(getattr(config, section.name)).items():
            shown = list(value) if isinstance(value, tuple) else value
            text = yaml.safe_dump(shown, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()
            lines.append(f"{name.replace('_', '-')}: {text}")
        lines.append("")
    return "\n".join(lines)


def load_config(argv: Sequence[str], environ: Mapping[str, str], *, prog: str = "nanoserve serve") -> ServerConfig:
    """Flags (without the program's name) and variables become the one configuration.

    Raises ConfigError with one line. `--help` and `--print-config` write to stdout and raise SystemExit(0).
    """
    flags, known = _from_flags(argv, prog)
    variables = _from_environment(environ)
    file = known.config or environ.get(_CONFIG_VARIABLE)
    config = _build({**(_from_file(Path(file)) if file else {}), **variables, **flags})
    check_config(config)
    if known.print_config:
        sys.stdout.write(dump_config(config))
        raise SystemExit(0)
    return config
