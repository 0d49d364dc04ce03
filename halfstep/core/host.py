"""What the operating system says about the machine that this process runs on."""

import math
import os
import platform
import subprocess
from pathlib import Path

from halfstep.core.devices import CPU_FEATURES, Device

_CPUINFO = Path("/proc/cpuinfo")
_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container


def describe_cpu() -> Device:
    """Returns what the system says about the processor."""
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    fields = _cpuinfo()
    name = fields.get("model name") or sysctl("machdep.cpu.brand_string") or platform.processor() or machine
    flags = fields.get("flags") or fields.get("Features") or ""
    return Device("cpu", name, architecture=machine, features=CPU_FEATURES & set(flags.split()))


def memory() -> int | None:
    """Returns the bytes of memory that this process can have, or None if unknown."""
    try:
        installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf
        return None
    try:
        limit = _LIMIT.read_text(encoding="ascii").strip()
    except OSError:
        limit = ""
    return min(installed, int(limit)) if limit.isdecimal() else installed


def format_bytes(number: float) -> str:
    """Returns a number of bytes in the unit that suits it: `1.2 GiB`."""
    units = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = min(int(math.log2(number) // 10), len(units) - 1) if number >= 1 else 0
    return f"{number:.0f} bytes" if power == 0 else f"{number / 1024**power:.1f} {units[power]}"


def threads() -> int | None:
    """Returns how many cores this process may use, or None if unknown."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def peak_memory() -> int:
    """Returns the most bytes that this process has held so far."""
    import resource  # Windows has none, and `halfstep probe` must run there

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024  # macOS counts bytes, Linux kilobytes


def _cpuinfo() -> dict[str, str]:
    if not _CPUINFO.exists():
        return {}
    first = _CPUINFO.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    pairs = [line.partition(":") for line in first.splitlines()]
    return {key.strip(): value.strip() for key, _, value in pairs}


def sysctl(key: str) -> str:
    """Returns a value that macOS knows; empty elsewhere."""
    if platform.system() != "Darwin":
        return ""
    done = subprocess.run(["sysctl", "-n", key], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def apple_generation(name: str) -> str:
    """Returns `m3` for `Apple M3 Max`."""
    words = [word.lower() for word in name.split()]
    return next((word for word in words if word[0] == "m" and word[1:].isdecimal()), "")
