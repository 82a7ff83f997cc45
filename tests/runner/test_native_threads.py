"""Where the C++ engine's threads may run: each on a core of its own, only while they compute for it, and on another
one's where that one waits for them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest

from nanoserve.runner.native.build import missing_cpu_features

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing_cpu_features()), reason="the CPU lacks what the engine needs"),
]

# In a process of its own: pytest's has threads of many makers.
_PROGRAM = """
import os, sys, time
from pathlib import Path
from tests.runner.native_models import make_native, make_spec
from tests.runner.tiny import Sequences

def masks():
    return {task.name: os.sched_getaffinity(int(task.name)) for task in Path("/proc/self/task").iterdir()}

before = masks()
backend = make_native(make_spec("llama"), threads=int(sys.argv[1]))
sequences = Sequences(backend, 16, 160, 0)
row = sequences.add([1, 2, 3])
for _ in range(int(sys.argv[2])):  # on a busy machine the caller may be through before another thread comes
    sequences.run([(row, 0, 3)])
    came = sorted(sorted(mask) for task, mask in masks().items() if task not in before)
    if all(len(mask) == 1 for mask in came):
        break
    time.sleep(0.01)
print((came, sorted(os.sched_getaffinity(0))))
"""


def _run(threads: int, steps: int) -> str:
    """Masks of the threads that came, and the caller's. Without torch's pool, which is none of the engine's."""
    return _output([_PROGRAM, str(threads), str(steps)])


def _output(program: list[str]) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", *program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.strip()


def test_a_team_of_all_cores_keeps_each_thread_on_its_own() -> None:
    """The caller, thread 0, is free again after a step: threads that it starts would inherit its one core."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == 1:
        pytest.skip("one core")
    came, free = ast.literal_eval(_run(len(cores), 1000))
    assert free == cores
    assert len(came) == len(cores) - 1
    assert all(len(mask) == 1 for mask in came)
    assert len({mask[0] for mask in came}) == len(came)


_LATE = """
import os, sys
from pathlib import Path
from tests.runner.native_models import make_native, make_spec
from tests.runner.tiny import Sequences

def tasks():
    return {task.name for task in Path("/proc/self/task").iterdir()}

before = tasks()
backend = make_native(make_spec("llama"), threads=len(os.sched_getaffinity(0)))
thread = min(map(int, tasks() - before))
sequences = Sequences(backend, 16, 160, 0)
row = sequences.add(list(range(3, 67)))
backend.slow_thread(int(sys.argv[1]), 3000)
cores = set()
for _ in range(300):
    sequences.run([(row, 0, 64)])
    cores |= os.sched_getaffinity(thread)
    if len(cores) > 1:
        break
print(len(cores))
"""


@pytest.mark.parametrize("late", [0, 1])
def test_who_waits_for_a_thread_changes_places_with_it(late: int) -> None:
    """A thread that does not go on probably has lost its core to another process. Looked at is thread 1."""
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("one core")
    assert _output([_LATE, str(late)]) == "2"


def test_a_team_of_other_size_goes_where_the_kernel_puts_it() -> None:
    cores = sorted(os.sched_getaffinity(0))
    assert _run(len(cores) + 1, 20) == str(([cores] * len(cores), cores))
