"""What a run was made with: versions, commit, device, threads, kernels, settings, load and models.

A result's key (`grids/identity.py`) and a run's tags take the same facts from here. This file knows
nothing of grids, commands or engines.
"""

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from specexp.errors import UserError
from specexp.zoo import known, naming, shelf
from specexp.zoo.shelf import PACKAGE, SOURCE

PACKAGES = ("specexp", "torch", "transformers")
COMPUTING = (
    "torch", "transformers", "tokenizers", "numpy", "scipy", "triton", "torchao", "gguf",
    "sentencepiece", "tiktoken", "jinja2", "pandas",
    # of quantised weights, and kernels that transformers takes if they are installed
    "compressed-tensors", "bitsandbytes", "gptqmodel", "hqq", "auto-round", "optimum",
    "optimum-quanto", "causal-conv1d", "mamba-ssm", "flash-linear-attention", "fla-core",
    "flash-attn", "kernels",
)  # fmt: skip
SWITCHES = ("SPECEXP_NATIVE", "SPECEXP_GRAPHS", "SPECEXP_FAST")
# Variables that choose kernels of libraries or divide their sums, and so decide the last digits of
# results: all whose names begin with a library's, and some more.
LIBRARIES = (
    "MKL_", "OMP_", "KMP_", "GOMP_", "OPENBLAS_", "ONEDNN_", "DNNL_", "CUBLAS_", "CUBLASLT_",
    "CUDNN_", "NPY_", "TORCH_MKLDNN_", "TORCH_CUDNN_", "TORCH_LINALG_", "TORCH_LINEAR_",
)  # fmt: skip
ROUNDING = (
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "LD_PRELOAD", "LD_LIBRARY_PATH",
    "GLIBC_TUNABLES", "PYTORCH_TUNABLEOP_ENABLED", "TORCH_BLAS_PREFER_CUBLASLT", "USE_HUB_KERNELS",
    "TRITON_F32_DEFAULT", "TRITON_INTERPRET", "DISABLE_ADDMM_CUDA_LT",
    "TRANSFORMERS_SDPA_FORCE_GQA", "TRANSFORMERS_DISABLE_DEEPGEMM_LINEAR",
)  # fmt: skip
QUIET = ("OMP_NUM_THREADS", "OMP_DISPLAY_ENV", "MKL_VERBOSE", "ONEDNN_VERBOSE", "DNNL_VERBOSE")
# Those that only change how long it takes.
PACE = (
    "OMP_PROC_BIND", "OMP_PLACES", "OMP_WAIT_POLICY", "GOMP_CPU_AFFINITY", "GOMP_SPINCOUNT",
    "KMP_AFFINITY", "KMP_BLOCKTIME", "MALLOC_CONF", "MALLOC_ARENA_MAX", "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF", "CUDA_LAUNCH_BLOCKING",
)  # fmt: skip
FACTS = (
    "device", "threads", "kernels", "versions", "settings", "instructions", "libraries",
    "processor", "driver", "python", "together",
)  # fmt: skip
"""The tags, and parts of a key, that tell what a run was made with in words."""
_UNITS = ("avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16")  # for matrices


def tags(device: str = "auto") -> dict[str, str]:
    """The tags of a run on this device: versions, all that `machine` says, load average, commit."""
    commit, dirty = os.environ.get("SPECEXP_GIT", "").split() or git_state()
    return {
        **{f"version.{name}": version(name) or "unknown" for name in PACKAGES},
        **machine(device, timed=True),
        **({"kernels": kernels(device)} if "specexp.engine" in sys.modules else {}),
        "load": f"{os.getloadavg()[0]:.2f}",
        "git.commit": commit,
        "git.dirty": dirty,
    }


def machine(device: str, timed: bool) -> dict[str, str]:
    """What decides, besides specexp's own kernels, which code runs on this device, and so which
    tokens come out; if `timed`, what decides only how long that takes, too."""
    import torch

    settings = [f"{n}={value}" for n, value in sorted(os.environ.items()) if _counts(n, timed)]
    versions = [f"{name} {number}" for name in COMPUTING if (number := version(name))]
    kind = device_class(device)
    return {
        "device": kind,
        "threads": str(torch.get_num_threads()),
        "versions": ", ".join(versions),
        "settings": ", ".join(settings) or "none",
        **({"instructions": instructions()} if kind == "cpu" else {"libraries": libraries()}),
        **({"processor": processor(), "python": platform.python_version()} if timed else {}),
        **({"driver": driver()} if timed and kind != "cpu" else {}),
    }


def _counts(variable: str, timed: bool) -> bool:
    """Whether this variable of the environment decides tokens or, if `timed`, seconds."""
    if not os.environ[variable] or variable in QUIET:
        return False
    if variable in PACE:
        return timed
    return variable.startswith(LIBRARIES) or variable in ROUNDING


def contents(params: Mapping[str, Any]) -> dict[str, str]:
    """Digests of what the names of a target, a drafter and prompts of one's own stand for, by these
    parameters; without what is not there, or has no files."""
    target, drafter, prompts = (str(params.get(n, "")) for n in ("target", "drafter", "prompts"))
    found, path = dict[str, str](), Path(prompts)
    with suppress(UserError, OSError):
        found["target"] = known.facts_of_model(naming.locate(target))[0][1]
        if drafter and (source := naming.source_of(drafter, target)):
            found["drafter"] = known.facts_of_model(source)[0][1]
    with suppress(OSError):
        texts = [path] if path.is_file() else sorted(path.glob("*.txt")) if path.is_dir() else []
        if prompts and texts:
            found["prompts"] = known.digest([known.digest_of(text) for text in texts])
    return found


def kernels(device: str) -> str:
    """Which of specexp's kernels run on this device (`ops.state`); compiles a CPU's if need be."""
    import torch

    from specexp import ops

    return ops.state(torch.device("cpu" if device_class(device) == "cpu" else "cuda"))


def uncompiled(device: str) -> list[Path]:
    """The files of this device's kernels that `kernels` would first compile."""
    import torch

    from specexp import ops

    home = ops.kernels_of(torch.device("cpu")) if device_class(device) == "cpu" else None
    return list(home.build.uncompiled()) if home else []


def version(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_class(device: str) -> str:
    """The GPU's name or "cpu", so that results of different devices have different keys."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"


def instructions() -> str:
    """The maker of this processor and the instructions that torch's libraries use there."""
    import torch

    maker, has = _cpuinfo("vendor_id") or platform.machine(), _cpuinfo("flags").split()
    capability = torch.backends.cpu.get_cpu_capability()
    return " ".join([maker, capability, *(unit for unit in _UNITS if unit in has)])


def libraries() -> str:
    """The versions of what torch's operations call on a GPU."""
    import torch

    cublas = (version(f"nvidia-cublas{suffix}") for suffix in ("", "-cu12", "-cu13"))
    versions = {"CUDA": torch.version.cuda, "cuDNN": torch.backends.cudnn.version()}
    versions |= {"cuBLAS": next(filter(None, cublas), None)}
    return ", ".join(f"{name} {number}" for name, number in versions.items() if number) or "none"


def driver(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The version of the GPU's driver, which decides how long its calls take."""
    text = file.read_text() if file.exists() else ""
    number = re.search(r"Module\b.*?\s(\d[\d.]+)\s", text)
    return number[1] if number else "unknown"


def processor() -> str:
    """What decides how long code takes on this processor: its model, how many cores this process
    may use at once, and whether memory may lie in huge pages."""
    model = _cpuinfo("model name") or platform.processor() or platform.machine()
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", pages.read_text()) if pages.exists() else None
    return f"{model}, {cores():g} cores, huge pages {chosen[1] if chosen else 'unknown'}"


def cores(root: Path = Path("/")) -> float:
    """How many cores this process may use: those that it may run on or, if that is less, the quota
    of its control groups; `root`: where /proc and /sys are."""
    most: float = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    own = root / "proc/self/cgroup"
    for line in own.read_text().splitlines() if own.exists() else ():
        _, kinds, name = line.split(":", 2)
        top = root / "sys/fs/cgroup" / ("cpu" if "cpu" in kinds.split(",") else "")
        group = top / name.lstrip("/")
        for folder in (f for f in (group, *group.parents) if f.is_relative_to(top)):
            with suppress(OSError, ValueError):
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if kinds else ("cpu.max",)
                quota, period = map(int, " ".join((folder / n).read_text() for n in names).split())
                most = min(most, round(quota / period, 2)) if quota > 0 else most
    return most


@cache
def _cpuinfo(field: str) -> str:
    """What Linux says of the first processor."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in pairs if name.strip() == field), "")


def code_digest() -> str:
    """A digest of the library's whole source as it is now, machinery included."""
    total = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*")):
        hidden = any(part[0] == "." for part in path.relative_to(PACKAGE).parts)  # editors'
        if path.suffix in SOURCE and not hidden and path.is_file():
            total.update(path.read_bytes())
    return total.hexdigest()


def git_state() -> tuple[str, str]:
    """The commit of the checkout, and "true" if tracked files differ from it, else "false". The
    commit is "" where there is no checkout or no git."""
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return _git("rev-parse", "HEAD"), str(bool(changed)).lower()


def _git(*args: str) -> str:
    root = shelf.CHECKOUT
    if root is None:  # an installed package may lie in somebody else's repository
        return ""
    try:
        git = subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=False)
    except OSError:  # not installed
        return ""
    return git.stdout.strip() if git.returncode == 0 else ""
