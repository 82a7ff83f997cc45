"""From --model and --tokenizer to one directory that holds everything the processes read.

The supervisor calls `find_prepared` first, which answers from the disk in milliseconds, and `prepare` when there is
work to do: a GGUF to convert, a model to download. api, engine and detok get the directory and read it with
`hub.model_files.read_model_files` and `tokenizer.load_tokenizer`. Whatever --tokenizer says is already in it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from nanoserve.config import ModelConfig, ServerConfig
from nanoserve.errors import StartupError
from nanoserve.hub import cache
from nanoserve.hub.download import cached_snapshot, download
from nanoserve.hub.model_files import read_model_files
from nanoserve.hub.sources import Source, SourceKind, locate
from nanoserve.tokenizer import TOKENIZER_FILES, load_tokenizer

Progress = Callable[[str, float], None]

_SIM_TOKENIZER = "smollm2-135m"
_SIM_CONTEXT = 32768
# What belongs to a tokenizer in a model directory. The first group is replaced as a whole by another tokenizer;
# of the second, files that the other one lacks stay.
_VOCABULARY_FILES = (*TOKENIZER_FILES, "vocab.json", "merges.txt", "added_tokens.json")
_COMPANION_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json")


def find_prepared(config: ServerConfig) -> Path | None:
    """The model's directory when it is ready to be read, None when `prepare` has work or an error to report.

    Reads a few small files; converts nothing, hashes nothing, imports nothing heavy.
    """
    try:
        return _resolve(config, None)
    except StartupError:
        return None


def prepare(config: ServerConfig, progress: Progress) -> Path:
    """Does whatever is needed and returns the model's directory.

    `progress` gets a stage ("reading model", "converting model", "downloading model") and the done part of it,
    0..1. Raises StartupError, one line, when the model cannot be found, read, converted or downloaded.
    """
    path = _resolve(config, progress)
    if path is None:  # cannot be: with a `progress` every step either gives a directory or raises
        raise StartupError(f"cannot prepare {config.model.model}")
    return path


def _resolve(config: ServerConfig, progress: Progress | None) -> Path | None:
    """Without `progress` only what is there already counts; with it, missing pieces are made."""
    try:
        return _sim_directory(config.model, progress) if config.is_sim else _model_directory(config.model, progress)
    except OSError as exc:  # a directory that may not be read, a name that no disk takes, and the like
        raise StartupError(f"cannot read {str(exc.filename or config.model.model)[:200]}: {exc.strerror}") from exc


def _model_directory(options: ModelConfig, progress: Progress | None) -> Path | None:
    need_weights = options.load_format != "dummy"
    model = _materialize(options.model, options, progress, weights=need_weights, revision=options.revision)
    if model is None:
        return None
    read_model_files(model, need_weights=need_weights)
    if not options.tokenizer:
        if not options.skip_tokenizer_init:
            _check_tokenizer(model)
        return model
    tokenizer = _materialize(options.tokenizer, options, progress, weights=False)
    if tokenizer is None:
        return None
    return _combine(options, model, tokenizer, progress)


def _sim_directory(options: ModelConfig, progress: Progress | None) -> Path | None:
    """The tokenizer's own directory where it has a config.json of use, else one with a config.json made for it."""
    name = options.tokenizer or _SIM_TOKENIZER
    tokenizer = _materialize(name, options, progress, weights=False, revision=options.revision)
    if tokenizer is None:
        return None
    if tokenizer.is_dir():
        _check_tokenizer(tokenizer)
        with contextlib.suppress(StartupError):
            read_model_files(tokenizer, need_weights=False)
            return tokenizer
    return _combine(options, None, tokenizer, progress)


def _materialize(
    name: str, options: ModelConfig, progress: Progress | None, *, weights: bool, revision: str = ""
) -> Path | None:
    """The directory (or tokenizer file) behind a name; None when it must be made and `progress` is None.

    --revision is the model's; a tokenizer named beside a model has its own history.
    """
    source = locate(name)
    if source.kind is SourceKind.GGUF:
        return _converted(source, options, progress, weights=weights)
    if source.kind is SourceKind.HUB:
        own_tokenizer = name != options.model or not options.tokenizer
        return _snapshot(source.repo, revision, progress, weights=weights, tokenizer=own_tokenizer)
    if source.kind is SourceKind.TOKENIZER_FILE and weights:
        raise StartupError(f"{name} is neither a model directory nor a .gguf file")
    return source.files[0]


def _converted(source: Source, options: ModelConfig, progress: Progress | None, *, weights: bool) -> Path | None:
    root = cache.cache_root(options)
    sha256 = cache.remembered_hash(root, source.files)
    if sha256 is None:
        if progress is None:
            return None
        files = cache.fingerprint(source.files)
        sha256 = _hash(source, progress)
        cache.remember_hash(root, source.files, files, sha256)
    target = cache.converted_path(root, source.name, sha256, weights=weights)
    if target.is_dir():
        return target
    if progress is None:
        return None
    from nanoserve.hub.convert import convert_gguf  # numpy and gguf: 0.4 s, needed only here

    stage = functools.partial(progress, "converting model")
    return convert_gguf(source.files, target, sha256, stage, weights=weights)


def _hash(source: Source, progress: Progress) -> str:
    sha256 = cache.hash_files(source.files, functools.partial(progress, "reading model"))
    if source.sha256 and sha256 != source.sha256:
        raise StartupError(f"{source.name}: the installed files are damaged (SHA-256 differs); install them again")
    return sha256


def _snapshot(repo: str, revision: str, progress: Progress | None, *, weights: bool, tokenizer: bool) -> Path | None:
    """The snapshot where all that is needed of it is there, else a download (which goes on with one cut short)."""
    snapshot = cached_snapshot(repo, revision)
    if snapshot is not None:
        with contextlib.suppress(StartupError):
            if tokenizer:
                _check_tokenizer(snapshot)
            if weights:
                read_model_files(snapshot)
            return snapshot
    if progress is None:
        return None
    stage = functools.partial(progress, "downloading model" if weights else "downloading tokenizer")
    return download(repo, revision, stage, weights=weights)


def _check_tokenizer(path: Path) -> None:
    """StartupError when the directory has no tokenizer; a converted one tells why."""
    if any((path / name).is_file() for name in TOKENIZER_FILES):
        return
    reason = f"no tokenizer in {path}: none of {', '.join(TOKENIZER_FILES)}; name one with --tokenizer"
    with contextlib.suppress(OSError, ValueError):
        reason = json.loads((path / cache.SOURCE_FILE).read_text(encoding="utf-8")).get("tokenizer_error") or reason
    raise StartupError(reason)


# ---- a model with another tokenizer ------------------------------------------------------------------------------


def _combine(options: ModelConfig, model: Path | None, tokenizer: Path, progress: Progress | None) -> Path | None:
    """A directory of links: the model's files with the tokenizer of another place; without a model, for sim."""
    name = model.name if model else "sim"
    target = cache.cache_root(options) / "combined" / f"{name}+{_key(model, tokenizer)}"
    if not target.is_dir():
        if progress is None:
            return None
        cache.make_directory(target, lambda directory: _fill_combined(directory, model, tokenizer))
    read_model_files(target, need_weights=model is not None and options.load_format != "dummy")
    _check_tokenizer(target)
    return target


def _key(model: Path | None, tokenizer: Path) -> str:
    """Changes with the places and with the set of files there; their content is followed through the links."""
    lines = []
    for path in (model, tokenizer):
        names = sorted(item.name for item in path.iterdir()) if path is not None and path.is_dir() else []
        lines += [str(path), *names]
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:16]


def _fill_combined(directory: Path, model: Path | None, tokenizer: Path) -> None:
    links: dict[str, Path] = {}
    if model is not None:
        links = {item.name: item for item in model.iterdir() if item.is_file() and item.name not in _VOCABULARY_FILES}
    if tokenizer.is_dir():
        _check_tokenizer(tokenizer)
        wanted = (*_VOCABULARY_FILES, *_COMPANION_FILES, *(() if model else ("generation_config.json",)))
        links |= {name: tokenizer / name for name in wanted if (tokenizer / name).is_file()}
    else:
        links[_standard_name(tokenizer)] = tokenizer
    for name, path in links.items():
        (directory / name).symlink_to(path.absolute())
    loaded = load_tokenizer(directory)  # a broken file is found here, before any process starts
    if model is None:
        config: dict[str, object] = {
            "model_type": "sim",
            "vocab_size": loaded.vocab_size,
            "max_position_embeddings": _SIM_CONTEXT,
        }
        cache.write_json(directory / "config.json", config)
        eos = read_model_files(directory, need_weights=False).eos_token
        if eos is not None and (eos_id := loaded.token_to_id(eos)) is not None:
            cache.write_json(directory / "config.json", config | {"eos_token_id": eos_id})


def _standard_name(file: Path) -> str:
    """The name under which `load_tokenizer` finds this kind of file in a directory."""
    if file.name.startswith("tekken"):
        return "tekken.json"
    return "tokenizer.model" if ".model" in file.name else "tokenizer.json"
