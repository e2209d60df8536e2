"""Where and with which software a benchmark ran."""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import torch

import fastattn
from fastattn import doctor
from fastattn.backends import operators

ROOT = Path(__file__).resolve().parent.parent


def describe(used: str | torch.device) -> dict:
    """Machine, versions and sources: everything that a result depends on."""
    device = torch.device(used)
    about = {
        "device": device.type,
        "device_name": doctor.processor(),
        "cpu": doctor.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),  # of the last minute, before the run
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "fastattn_isa": None if operators.EXTENSION_ERROR else torch.ops.fastattn.cpu_isa(),
        "extension": operators.EXTENSION_ERROR or "loaded",
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "fastattn": fastattn.__version__,
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "modified": bool(_git("status", "--porcelain", "--", ".", ":!bench/results")),
    }
    return about | (_gpu(device) if device.type == "cuda" else {})


def slug(about: dict) -> str:
    """The name of a device's results folder, which identifies the kind of machine."""
    if about["device"] == "cuda":
        parts = [about["device_name"]]
    else:
        parts = [about["cpu"], isa(about), f"{about['threads']} threads"]
    return re.sub(r"[^a-z0-9]+", "-", " ".join(parts).lower()).strip("-")


def isa(about: dict) -> str:
    """The instruction set of our kernels on a CPU; torch's where they are not compiled."""
    return about.get("fastattn_isa") or about["torch_isa"]


def free_bytes() -> float:
    """Memory that a process can have without swapping; infinite if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    return next((1024.0 * int(x.split()[1]) for x in lines if x[:13] == "MemAvailable:"), math.inf)


def _gpu(device: torch.device) -> dict:
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    joined = ".".join(map(str, capability))
    return {"device_name": name, "cuda": torch.version.cuda, "capability": joined}


def _git(*args: str) -> str | None:
    """What git prints; None outside a checkout."""
    try:
        command = ["git", "-C", str(ROOT), *args]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


if __name__ == "__main__":  # the name of this machine's results folder, for the Makefile
    print(slug(describe("cuda" if torch.cuda.is_available() else "cpu")))
