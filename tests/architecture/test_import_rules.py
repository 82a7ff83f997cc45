"""Imports point down only, torch stays in runner/, the pure cores do no I/O, the light processes stay light."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import pytest

from tests.architecture.source import Module, modules

# What each package may import of nanoserve besides itself. Lower ones first; nobody imports upwards.
_BASE = {"errors", "config"}
ALLOWED = {
    "errors": set[str](),
    "config": set[str](),
    "ipc": {"errors"},
    "obs": _BASE | {"ipc"},
    "tokenizer": _BASE,
    "stop_regex": set[str](),
    "shares": set[str](),
    "hub": _BASE | {"obs", "tokenizer"},
    "sched": _BASE | {"ipc", "shares"},
    "runner": _BASE | {"ipc", "obs", "hub", "sched", "tokenizer"},
    "engine": _BASE | {"ipc", "obs", "hub", "sched", "runner", "tokenizer"},
    "detok": _BASE | {"ipc", "obs", "hub", "tokenizer", "stop_regex"},
    "api": _BASE | {"ipc", "obs", "hub", "tokenizer", "stop_regex", "shares"},
}
# The cores that take values and return values: no clock, no socket, no file, no thread.
_PURE_DETOK = ("incremental", "byte_decoder", "stop_strings", "state", "intake", "emit", "logprobs", "vocabulary")
_PURE_TOP = ("nanoserve.stop_regex", "nanoserve.shares")
PURE = ["nanoserve.sched.", *_PURE_TOP, *(f"nanoserve.detok.{name}" for name in _PURE_DETOK)]
IO_MODULES = {
    "asyncio", "io", "logging", "multiprocessing", "os", "pathlib", "queue", "random", "select", "selectors", "shutil",
    "signal", "socket", "subprocess", "tempfile", "threading", "time", "torch", "urllib", "zmq", "aiohttp", "numpy",
}  # fmt: skip


def top(name: str) -> str:
    return name.split(".")[0]


@pytest.mark.parametrize("module", [m for m in modules() if m.layer in ALLOWED], ids=lambda m: m.name)
def test_imports_point_down(module: Module) -> None:
    allowed = ALLOWED[module.layer] | {module.layer}
    for name in module.imports():
        parts = name.split(".")
        if parts[0] == "nanoserve" and len(parts) > 1 and parts[1] != "__version__":
            assert parts[1] in allowed, f"{module.path} imports {name}"


# Benchmarks compare with others and may load what they like; nothing imports them.
@pytest.mark.parametrize("module", [m for m in modules() if m.layer != "bench"], ids=lambda m: m.name)
def test_torch_only_in_runner_and_transformers_nowhere(module: Module) -> None:
    names = {top(name) for name in module.imports()}
    assert "transformers" not in names
    assert "pickle" not in names
    if module.layer != "runner":
        assert "torch" not in names
    assert not any(name.startswith("nanoserve.bench") for name in module.imports())


@pytest.mark.rule(17)
@pytest.mark.parametrize("module", [m for m in modules() if m.layer == "api"], ids=lambda m: m.name)
def test_api_opens_no_outgoing_connection(module: Module) -> None:
    """Not even to look: nothing that a request says makes the server call somewhere."""
    clients = {"urllib.request", "http.client", "requests", "httpx", "huggingface_hub", "aiohttp.ClientSession"}
    assert not module.imports() & clients
    calls = {"ClientSession", "create_connection", "open_connection", "connect", "sock_connect", "getaddrinfo"}
    called = {
        getattr(node.func, "attr", getattr(node.func, "id", ""))
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
    }
    assert not called & calls


@pytest.mark.parametrize("module", [m for m in modules() if m.name.startswith(tuple(PURE))], ids=lambda m: m.name)
def test_pure_cores_do_no_io(module: Module) -> None:
    assert not {top(name) for name in module.imports()} & IO_MODULES


def test_the_wire_protocol_needs_only_msgspec() -> None:
    (messages,) = [m for m in modules() if m.name == "nanoserve.ipc.messages"]
    foreign = {top(name) for name in messages.imports()} - set(sys.stdlib_module_names)
    assert foreign == {"msgspec"}


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        ("nanoserve.api.process", {"torch", "transformers", "numpy", "gguf", "safetensors", "huggingface_hub"}),
        ("nanoserve.detok.process", {"torch", "transformers", "numpy", "gguf", "safetensors", "aiohttp", "jinja2"}),
        ("nanoserve.supervisor", {"torch", "transformers", "numpy", "gguf", "tokenizers", "aiohttp"}),
        ("nanoserve.hub.resolve", {"torch", "transformers", "numpy", "gguf", "tokenizers", "huggingface_hub"}),
        ("nanoserve.sched.scheduler", {"torch", "transformers", "numpy", "zmq"}),
        ("nanoserve.engine.core", {"torch", "transformers"}),
        ("nanoserve", {"torch", "transformers", "numpy", "zmq", "aiohttp"}),
    ],
)
def test_a_process_stays_light(module: str, banned: set[str]) -> None:
    """In a fresh interpreter: importing torch costs a second and 200 MB, transformers four seconds and 400 MB."""
    code = f"import json, sys, {module}; print(json.dumps(sorted({{n.split('.')[0] for n in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not banned & set(json.loads(done.stdout))
