"""What is known of the machine that this process runs on, whatever the framework: asked of the system."""

import os
import platform
import subprocess
from pathlib import Path

from halfstep.core.devices import CPU_FEATURES, Device

_CPUINFO = Path("/proc/cpuinfo")
_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container


def describe_cpu() -> Device:
    """The processor, by what the system says of it."""
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    fields = _cpuinfo()
    name = fields.get("model name") or sysctl("machdep.cpu.brand_string") or platform.processor() or machine
    flags = fields.get("flags") or fields.get("Features") or ""
    return Device("cpu", name, architecture=machine, features=CPU_FEATURES & set(flags.split()))


def memory() -> int | None:
    """The bytes of memory that this process can have; None where the system does not say."""
    try:
        found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf
        return None
    try:
        limit = _LIMIT.read_text(encoding="ascii").strip()
    except OSError:
        limit = ""
    return min(found, int(limit)) if limit.isdecimal() else found


def threads() -> int | None:
    """The cores that this process may use; None where the system does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def peak_memory() -> int:
    """The most bytes that this process held so far."""
    import resource  # Windows has none, and a probe of it must run there

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024  # macOS counts bytes, Linux kilobytes


def _cpuinfo() -> dict[str, str]:
    """The fields of the first core, where the system is Linux."""
    if not _CPUINFO.exists():
        return {}
    first = _CPUINFO.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def sysctl(key: str) -> str:
    """A fact of macOS; empty elsewhere."""
    if platform.system() != "Darwin":
        return ""
    done = subprocess.run(["sysctl", "-n", key], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def apple_generation(name: str) -> str:
    """`m3` of `Apple M3 Max`."""
    words = [word.lower() for word in name.split()]
    return next((word for word in words if word[0] == "m" and word[1:].isdecimal()), "")
