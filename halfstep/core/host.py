"""What is known of the machine that this process runs on, whatever the framework: asked of the system."""

import platform
import subprocess
from pathlib import Path

from halfstep.core.devices import CPU_FEATURES, Device

_CPUINFO = Path("/proc/cpuinfo")


def describe_cpu() -> Device:
    """The processor, by what the system says of it."""
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    fields = _cpuinfo()
    name = fields.get("model name") or sysctl("machdep.cpu.brand_string") or platform.processor() or machine
    flags = fields.get("flags") or fields.get("Features") or ""
    return Device("cpu", name, architecture=machine, features=CPU_FEATURES & set(flags.split()))


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
