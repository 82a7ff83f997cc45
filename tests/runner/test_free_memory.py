"""Free memory: the machine's, or what the control groups above the process leave of it, at any level."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nanoserve.runner.free_memory import HostMemory, free_memory

pytestmark = pytest.mark.slow

MIB = 1 << 20
UNLIMITED = "9223372036854771712"  # version 1's word for it


class Machine:
    """A process's own view of its control groups, as files below a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mounts: list[str] = []
        self.proc = directory / "proc"
        self.proc.mkdir()

    def mount(self, name: str, kind: str, *, root: str = "/", options: str = "rw") -> Path:
        point = self._directory / name
        point.mkdir()
        self._mounts.append(f"35 31 0:32 {root} {point} rw,nosuid shared:9 - {kind} cgroup {options}")
        (self.proc / "mountinfo").write_text("\n".join(["23 1 0:21 / /proc rw - proc proc rw", *self._mounts]) + "\n")
        return point

    def join(self, *lines: str) -> None:
        (self.proc / "cgroup").write_text("\n".join(lines) + "\n")

    def free_mib(self) -> float:
        return HostMemory(self.proc).free_bytes() / MIB


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def group_v1(directory: Path, limit: str, rss: int, shmem: int = 0) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.limit_in_bytes").write_text(f"{limit}\n")
    # The page cache fills a group up to its limit by itself, and gives way: it does not count.
    stat = f"rss 1\ntotal_cache {99 * MIB}\ntotal_rss {rss * MIB}\ntotal_shmem {shmem * MIB}\n"
    (directory / "memory.stat").write_text(stat)


def group_v2(directory: Path, limit: str, anon: int, *, high: str = "max") -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.high").write_text(f"{high}\n")
    (directory / "memory.stat").write_text(f"anon {anon * MIB}\nfile {99 * MIB}\nshmem {MIB}\n")


def test_without_groups_it_is_the_machines(machine: Machine) -> None:
    assert HostMemory(machine.proc).free_bytes() > 100 * MIB
    assert free_memory(torch.device("cpu")) > 100 * MIB


def test_the_tightest_level_of_version_2_counts(machine: Machine) -> None:
    top = machine.mount("unified", "cgroup2")
    machine.join("0::/batch.slice/job/step")
    group_v2(top / "batch.slice/job/step", "max", 3)
    assert machine.free_mib() > 100
    group_v2(top / "batch.slice/job", str(50 * MIB), 20)
    group_v2(top / "batch.slice", str(60 * MIB), 40)
    assert machine.free_mib() == 60 - 40 - 1
    group_v2(top / "batch.slice/job/step", "max", 3, high=str(8 * MIB))
    assert machine.free_mib() == 8 - 3 - 1
    group_v2(top / "batch.slice/other", str(2 * MIB), 1)  # not above this process
    assert machine.free_mib() == 4


@pytest.mark.parametrize("path", ["/", "/../other"])
def test_in_a_container_its_own_group_is_the_top(machine: Machine, path: str) -> None:
    top = machine.mount("unified", "cgroup2")
    machine.join(f"0::{path}")
    group_v2(top, str(30 * MIB), 9)
    assert machine.free_mib() == 20


@pytest.mark.parametrize("path", ["/docker/1f", "/docker/1f/inner", "/../other", "/elsewhere"])
def test_version_1_in_a_container_that_sees_part_of_the_tree(machine: Machine, path: str) -> None:
    machine.mount("cpu", "cgroup", root="/docker/1f", options="rw,cpu,cpuacct")
    top = machine.mount("memory", "cgroup", root="/docker/1f", options="rw,memory")
    machine.mount("unified", "cgroup2", root="/docker/1f")
    machine.join("5:cpu,cpuacct:/docker/1f", f"4:hugetlb,memory:{path}", "0::/")
    group_v1(top, str(40 * MIB), 10, 5)
    group_v1(top / "inner", UNLIMITED, 10)
    assert machine.free_mib() == 25


def test_levels_of_version_1(machine: Machine) -> None:
    top = machine.mount("memory", "cgroup", options="rw,memory")
    machine.join("4:memory:/a/b", "0::/")
    group_v1(top, UNLIMITED, 5000)
    group_v1(top / "a", str(40 * MIB), 10)
    group_v1(top / "a/b", UNLIMITED, 10)
    assert machine.free_mib() == 30
    group_v1(top / "a/b", str(20 * MIB), 21)
    assert machine.free_mib() == 0, "more than the limit: just lowered, perhaps"
