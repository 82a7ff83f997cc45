"""Flags, variables and files become one configuration, and every mistake is one line that names its place."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from nanoserve import cli
from nanoserve.__main__ import serve_command
from nanoserve.cli import build_parser, dump_config, load_config, options, parse_size, unused_variables
from nanoserve.config import ServerConfig
from nanoserve.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]


def error(argv: list[str], environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(argv, environ or {})
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_nothing_given_is_the_default_tree() -> None:
    assert load_config([], {}) == ServerConfig()


def test_flag_beats_variable_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("port: 1\nmax-num-seqs: 2\nblock_size: 4\n")
    config = load_config(["--config", str(file), "--port", "3"], {"NANOSERVE_PORT": "9", "NANOSERVE_MAX_NUM_SEQS": "8"})
    assert (config.api.port, config.scheduler.max_num_seqs, config.cache.block_size) == (3, 8, 4)


def test_model_may_be_positional_but_not_twice() -> None:
    assert load_config(["org/name", "--port", "1"], {}).model.model == "org/name"
    assert "twice" in error(["org/name", "--model", "other"])


@pytest.mark.parametrize(
    ("text", "value"),
    [("512MiB", 512 << 20), ("4g", 4 << 30), ("32k", 32768), ("1.5 GB", 1_500_000_000), ("7", 7), ("2Ki", 2048)],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_size(text) == value
    assert load_config(["--kv-cache-memory", text], {}).cache.kv_cache_memory == value


@pytest.mark.parametrize("text", ["", "k", "4x", "-1", "0.3", "1e9", "4 g g"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        parse_size(text)


@pytest.mark.parametrize("item", options(), ids=lambda o: o.name)
def test_every_field_is_a_flag_a_key_and_a_variable(item: cli.Option, tmp_path: Path) -> None:
    """Takes a value other than the default through each of the three ways, and through each alias."""
    text = _other_value(item)
    wanted = item.parse(text, "")
    assert wanted != item.default
    ways = [([f"--{name}", text], {}) for name in item.names]
    if item.kind is bool:
        ways = [([("--no-" if item.default else "--") + name for name in item.names[:1]], {})]
    ways.append(([], {item.variable: text}))
    for spelling in (item.name, item.name.replace("_", "-")):
        file = tmp_path / f"{spelling}.yaml"
        file.write_text(f"{spelling}: {text}\n")
        ways.append((["--config", str(file)], {}))
    for argv, environ in ways:
        values = _values(argv, environ)
        assert values == {item.name: wanted}


def _values(argv: list[str], environ: dict[str, str]) -> dict[str, object]:
    """What was given, before defaults and cross-checks."""
    flags, known = cli._from_flags(argv, "x")
    file = cli._from_file(Path(known.config)) if known.config else {}
    return {**file, **cli._from_environment(environ), **flags}


def _other_value(item: cli.Option) -> str:
    if item.metadata["choices"]:
        return next(choice for choice in item.metadata["choices"] if choice != item.default)
    if item.kind is bool:
        return "false" if item.default else "true"
    if item.kind in (int, float):
        return str(item.default + (1 if item.kind is int else 1.5))
    return "abc"


def test_every_field_has_help_and_the_help_shows_its_default() -> None:
    help_text = " ".join(build_parser().format_help().split())
    for item in options():
        assert item.metadata["help"]
        assert item.flag in help_text
        if item.kind in (int, float) or (item.kind is str and item.default):
            assert f"[{item.default}]" in help_text
    for section in dataclasses.fields(ServerConfig):
        assert f"{section.name}:" in help_text
    for code in cli.EXIT_CODES:
        assert str(code) in help_text


def test_field_names_and_aliases_are_unique() -> None:
    names = [name for item in options() for name in item.names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max-num-seq", "1"], ["unknown flag --max-num-seq", "--max-num-seqs"]),
        (["--dtype", "float23"], ["--dtype", "float32"]),
        (["--port", "http"], ["--port", "'http'"]),
        (["--port", "70000"], ["--port", "65535"]),
        (["--port"], ["--port"]),
        (["--kv-cache-memory", "much"], ["--kv-cache-memory", "512MiB"]),
        (["--drain-timeout", "nan"], ["--drain-timeout", "finite"]),
        (["--max-num-seqs", "0"], ["--max-num-seqs"]),
        (["--max-connections", "0"], ["--max-connections"]),
        (["--max-headers", "0"], ["--max-headers"]),
        (["--ssl-keyfile", "key.pem"], ["--ssl-keyfile", "--ssl-certfile"]),
        (["--write-timeout", "-1"], ["--write-timeout"]),
        (["--max-model-len", "1"], ["--max-model-len", "2"]),
        (["--max-model-len", "1t"], ["--max-model-len", "16777216"]),
        (["--num-kv-blocks", "99999999999999999999"], ["--num-kv-blocks"]),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "8"], ["--max-num-batched-tokens", "--max-num-seqs"]),
        (["--watchdog-hard", "5"], ["--watchdog-hard"]),
        (["--chat-template", "/does/not/exist"], ["--chat-template"]),
        (["--config", "/does/not/exist.yaml"], ["/does/not/exist.yaml"]),
        (["a", "b"], ["'b'"]),
        (["--prefix-cache=yes"], ["prefix-cache"]),
    ],
)
def test_wrong_flags_are_named(argv: list[str], words: list[str]) -> None:
    text = error(argv)
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("max-num-sqs: 3", ["max-num-sqs", "max-num-seqs"]),
        ("port: [1, 2]", ["port", "list"]),
        ("port: yes", ["port"]),
        ("port: 1\nPort: 2", ["Port"]),
        ("block-size: 4\nblock_size: 5", ["block-size", "twice"]),
        ("prefix-cache: 3", ["prefix-cache"]),
        ("- a", ["mapping"]),
        ("a: b: c", ["YAML"]),
        ("max-num-seqs: 3.5", ["max-num-seqs"]),
    ],
)
def test_wrong_files_are_named(content: str, words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(content)
    text = error(["--config", str(file)])
    assert all(word in text for word in [*words, str(file)]), text


def test_wrong_variables_are_named() -> None:
    assert "NANOSERVE_PORT" in error([], {"NANOSERVE_PORT": "x"})
    assert "NANOSERVE_PREFIX_CACHE" in error([], {"NANOSERVE_PREFIX_CACHE": "maybe"})


def test_ctrl_c_before_the_server_listens_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("nanoserve.supervisor.serve", interrupted)
    assert serve_command([]) == 130


def test_a_system_without_descriptors_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def starved(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("nanoserve.supervisor.serve", starved)
    assert serve_command([]) == 1
    assert capsys.readouterr().err == "nanoserve: the system has no more: Too many open files\n"


def test_a_kubernetes_service_called_nanoserve_does_no_harm() -> None:
    assert load_config([], {"NANOSERVE_PORT": "tcp://10.0.0.1:8000"}) == ServerConfig()


def test_a_misspelt_variable_is_told_and_one_of_kubernetes_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    service = ("NANOSERVE_SERVICE_HOST", "NANOSERVE_SERVICE_PORT_HTTP", "NANOSERVE_PORT_8_TCP_ADDR", "NANOSERVE_A_PORT")
    used = ("NANOSERVE_MAX_NUM_SEQS", "NANOSERVE_CONFIG", "HOME")
    assert unused_variables(dict.fromkeys(service + used, "1")) == []
    monkeypatch.setattr("os.environ", {"NANOSERVE_MAX_NUM_SEQZ": "3", "NANOSERVE_XYZ": ""})
    with pytest.raises(SystemExit):
        serve_command(["--print-config"])
    assert capsys.readouterr().err.splitlines() == [
        "nanoserve: NANOSERVE_MAX_NUM_SEQZ names no option and is not used (did you mean NANOSERVE_MAX_NUM_SEQS?)",
        "nanoserve: NANOSERVE_XYZ names no option and is not used",
    ]


def test_empty_file_and_null_values_are_defaults(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("# nothing\nport:\n")
    assert load_config(["--config", str(file)], {}) == ServerConfig()


def test_lists(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("served-model-name: [a, b]\n")
    for argv, environ in (
        (["--served-model-name", "a", "b"], {}),
        (["--served-model-name", "a", "--port", "1", "--served-model-name", "b"], {"NANOSERVE_SERVED_MODEL_NAME": "c"}),
        ([], {"NANOSERVE_SERVED_MODEL_NAME": "a, b"}),
        (["--config", str(file)], {}),
    ):
        assert load_config(argv, environ).served_names == ("a", "b")


def test_print_config_reads_back_to_the_same_tree(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["sim", "--served-model-name", "x", "y", "--no-prefix-cache", "--drain-timeout", "2.5", "--tokenizer", "on"]
    with pytest.raises(SystemExit) as ended:
        load_config([*argv, "--print-config"], {})
    assert ended.value.code == 0
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    assert load_config(["--config", str(file)], {}) == load_config(argv, {})


@given(st.text(max_size=20))
def test_any_text_value_survives_the_printed_file(text: str) -> None:
    config = ServerConfig()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, model=text))
    assert yaml.safe_load(dump_config(config))["model"] == text


def test_the_tree_travels_to_the_children_as_json() -> None:
    config = load_config(["sim", "--served-model-name", "x", "y", "--max-model-len", "32k"], {})
    assert msgspec.json.decode(msgspec.json.encode(config), type=ServerConfig) == config


@pytest.mark.parametrize("file", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_files_are_complete_and_truthful(file: Path) -> None:
    load_config(["--config", str(file)], {})
    keys = yaml.safe_load(file.read_text())
    if file.name == "default.yaml":
        assert load_config(["--config", str(file)], {}) == ServerConfig()
        names = [item.name.replace("_", "-") for item in options()]
        assert list(keys) == names, "write it again: nanoserve serve --print-config > configs/default.yaml"


def test_files_are_shipped() -> None:
    assert {path.name for path in (REPOSITORY / "configs").glob("*.yaml")} >= {"default.yaml", "cpu.yaml", "gpu.yaml"}
