"""How many bytes this process could still allocate: the GPU's, or the machine's within the limits set for the process.

A limit may stand at any level of the control groups above the process: a container's, a systemd slice's, a batch job's.
What passes it is killed, so the least that any level has left counts. Files: cgroup-v2.rst and cgroup-v1/memory.rst of
Linux; where a group is found: proc_pid_cgroup(5) and proc_pid_mountinfo(5).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil
import torch

_PROC = Path("/proc/self")
_UNLIMITED = 1 << 63


@dataclass(frozen=True, slots=True)
class _Version:
    """Names of one version of control groups: files of limits, and the parts of memory.stat that cannot be dropped.

    Not the total that is in use: that counts the page cache too, which the weights' files alone can fill.
    """

    limits: tuple[str, ...]
    used: tuple[str, ...]


_V1 = _Version(("memory.limit_in_bytes",), ("total_rss", "total_shmem"))
_V2 = _Version(("memory.max", "memory.high"), ("anon", "shmem"))


class HostMemory:
    """The machine's memory. Which groups the process is in is found once; elsewhere than on Linux it is in none."""

    def __init__(self, proc: Path = _PROC) -> None:
        self._groups = _find_groups(proc)

    def free_bytes(self) -> int:
        free = int(psutil.virtual_memory().available)
        return max(0, min([free, *(_left(directory, version) for directory, version in self._groups)]))


def free_memory(device: torch.device) -> int:
    """Bytes that could still be allocated on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return HostMemory().free_bytes()


def _find_groups(proc: Path) -> list[tuple[Path, _Version]]:
    """Directories of the groups that have a limit now or may get one, from the process's own to the outermost seen."""
    try:
        paths = dict(line.split(":", 2)[1:] for line in (proc / "cgroup").read_text().splitlines())
        mounts = [line.split() for line in (proc / "mountinfo").read_text().splitlines()]
    except (OSError, ValueError):
        return []
    groups = []
    for fields in mounts:
        root, mount_point, (kind, _, options) = fields[3], Path(fields[4]), fields[fields.index("-") + 1 :][:3]
        if kind == "cgroup2":
            path, version = paths.get(""), _V2
        elif kind == "cgroup" and "memory" in options.split(","):
            path, version = next((paths[names] for names in paths if "memory" in names.split(",")), None), _V1
        else:
            continue
        if path is not None:
            below = _below(path, root)
            groups += [(mount_point / level, version) for level in (below, *below.parents)]
    return groups


def _below(path: str, root: str) -> PurePosixPath:
    """The group's place under the mounted part; a container may be told a path that it cannot see: then the top."""
    try:
        return PurePosixPath(path).relative_to(root)
    except ValueError:
        return PurePosixPath()


def _left(directory: Path, version: _Version) -> int:
    """Bytes that one group may still take; _UNLIMITED where it has no limit (v2's root group has no files at all)."""
    try:
        limits = [(directory / name).read_text().strip() for name in version.limits]
        limit = min(int(text) for text in limits if text != "max")
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return _UNLIMITED
    return limit - sum(int(stat.get(name, 0)) for name in version.used)
