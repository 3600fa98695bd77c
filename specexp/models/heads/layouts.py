"""The layouts in which heads are published: Medusa, EAGLE, DFlash and `speculators`.

A folder or hub id becomes one description (`Head`) with the tensor names of the published EAGLE-3,
Medusa and DFlash files. Weights are safetensors, or pickles that hold only tensors
(`weights_only`). This file knows files and names, without torch; weights.py builds and writes them.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub  # imports a function when it is used
from safetensors import safe_open

from specexp import fitting
from specexp.errors import UserError, first_line, refusing, waiting

if TYPE_CHECKING:
    from torch import Tensor

LAYOUTS = (
    "Medusa heads, EAGLE, EAGLE-3, P-EAGLE, MTP, DFlash, DFlash 2 and DSpark, also as speculators"
)
_MEDUSA = re.compile(r"^(?:medusa_(?:lm_)?heads?\.)?(\d+\.\d+\.(?:linear\.)?(?:weight|bias))$")
_OUTSIDE = re.compile(r"^(lm_head\.|d2t$|t2d$)")  # what is never below `model.`
# other names of EAGLE-3: ModelOpt's exporter from Megatron, SGLang's older norms
_EAGLE3 = {
    r"^midlayer\.0\.": "midlayer.", r"^midlayer\.([1-9])": r"layers.\1",
    r"^layers\.0\.": "midlayer.", r"^(layers\.[1-9]\d*)\.hidden_norm": r"\1.input_layernorm",
    "^aux_norm_low": "fc_norm.0", "^aux_norm_mid": "fc_norm.1", "^aux_norm_high": "fc_norm.2",
}  # fmt: skip
# derived from d2t, the target's, or by what DSpark lets an engine verify less
_NOT_OURS = re.compile(r"^(t2d|verifier_\w+\.weight|confidence_(head|proj)\..*)$")
_MTP = {"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj",
        "final_layernorm": "post_norm"}  # fmt: skip
_WEIGHTS = ("*.safetensors", "*.pt", "*.bin")  # the first kind that exists is read
MASK_EMBEDDING = "mask_embedding.pt"  # what vLLM embeds masks by, where a block has it
# what trainers leave beside weights
_BESIDE = {"training_args.bin", "training_state.pt", "optimizer.pt", "scheduler.pt", MASK_EMBEDDING}
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
TAPS = "eagle_aux_hidden_state_layer_ids"
EAGLE3, BLOCKS = ("eagle3", "peagle"), ("dflash", "dflash2", "dspark")
DRAFTED_BY = {"medusa": "medusa", "eagle": "eagle", "mtp": "mtp"} | dict.fromkeys(EAGLE3, "eagle")
DRAFTED_BY |= dict.fromkeys(BLOCKS, "dflash")  # the drafting method of each kind
BLOCK_TAPS = "aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Head:
    """Heads on disk. kind: `medusa`, `eagle`, `mtp` or one of EAGLE3 or BLOCKS; config as in
    config.json; of every tensor, by our names, `shapes` and `places`: its file, and its name there.
    Weights are read only by `tensors`."""

    kind: str
    source: str
    folder: Path
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    places: dict[str, tuple[Path, str]]

    def tensors(self) -> dict[str, Tensor]:
        """The weights, by our names, on the CPU."""
        tensors: dict[str, Tensor] = {}
        for file in {file for file, _ in self.places.values()}:
            names = {ours: name for ours, (place, name) in self.places.items() if place == file}
            if file.suffix == ".safetensors":
                with safe_open(file, "pt") as opened:
                    tensors |= {ours: opened.get_tensor(name) for ours, name in names.items()}
            else:
                held = _unpickled(file)
                tensors |= {ours: held[name].clone() for ours, name in names.items()}
        return tensors

    @property
    def subject(self) -> str:
        """What they are, for the beginning of a message."""
        return f"{self.source} are {self.kind} heads"

    @property
    def norms(self) -> tuple[str, ...]:
        """The NORMS that are on, by the config itself or its `eagle_config` (ModelOpt), also by
        TensorRT-LLM's and SGLang's names. One that neither mentions is off, as in the `speculators`
        package."""
        both = self._part("eagle_config") | self.config
        other = {"norm_output": "return_hidden_post_norm", "fc_norm": "use_aux_norm"}
        return tuple(n for n in NORMS if both.get(n, both.get(other.get(n, ""))))

    @property
    def fuses(self) -> bool:
        """Whether EAGLE-3 fuses several states, and does not read the LM head's input instead."""
        return self._part("eagle_config").get("use_aux_hidden_state") is not False

    def taps(self, layers: int) -> tuple[int, ...]:
        """The states that EAGLE-3 reads of a target with so many layers, numbered like
        transformers' `hidden_states`: 0 is the embeddings, t the output of layer t - 1 (layers
        count from 0); except that of the last layer's output, -1, the target's last norm is no
        part. Without a list, those that EAGLE-3's own code reads.

        A list in the config itself, as in the `speculators` format, is numbered like that (vLLM
        reads state t where layer t begins). A list in `eagle_config` names layers, whose outputs
        SpecForge and ModelOpt train on; by default 1, L/2 - 1 and L - 4, which are states 2, L/2
        and L - 3. Some name states there: a list that is those, or has a number that no layer has,
        is taken for states. A wrong assumption costs only acceptance. States are fused in the order
        of the layers, not of the list."""
        own, nested = self.config.get(TAPS), self._part("eagle_config").get(TAPS)
        listed = self._numbers(TAPS, own or nested or [])
        usual = default_taps(layers)
        states = own or sorted(listed) == [*usual] or max(listed, default=0) >= layers
        taps = sorted(t if states else t + 1 for t in listed) or usual
        return tuple(-1 if t == layers else t for t in taps)

    @property
    def mask(self) -> int:
        """The token that P-EAGLE reads where one is not known yet. Raises UserError if none is
        named."""
        named = (self.config.get(n) for n in ("mask_token_id", "pard_token", "ptd_token_id"))
        mask = next((token for token in named if token is not None), None)
        if type(mask) is not int:
            raise UserError(f"{self.source}: config.json must give mask_token_id for P-EAGLE")
        return mask

    @property
    def block_taps(self) -> tuple[int, ...]:
        """The same of a block drafter, in the order in which it fuses them: a list of states in the
        `speculators` format, else of layers. () if none are listed."""
        if listed := self.config.get(BLOCK_TAPS):
            return self._numbers(BLOCK_TAPS, listed)
        layers = self.setting("target_layer_ids", [])
        return tuple(t + 1 for t in self._numbers("target_layer_ids", layers))

    @property
    def draft_vocab(self) -> int:
        """The tokens of their own LM head; 0: they have none, and borrow the target's."""
        few = self.kind != "eagle" and self.setting("draft_vocab_size")
        return (few or self.config["vocab_size"]) if "lm_head.weight" in self.shapes else 0

    def setting(self, name: str, default: Any = None) -> Any:
        """A setting: of the `dflash_config`, of the config itself, or of its rotation."""
        rotations = self._part("rope_parameters"), self._part("rope_scaling")
        named = (part.get(name) for part in (self._part("dflash_config"), self.config, *rotations))
        return next((value for value in named if value is not None), default)

    def insist_on(self, usual: Mapping[str, Any]) -> None:
        """Raise UserError for a setting with another value than this, the only one run here."""
        for name, value in usual.items():
            if (own := self.setting(name, value)) != value:
                raise UserError(f"{self.subject} with {name} {own}, which is not run here")

    def _numbers(self, field: str, listed: Any) -> tuple[int, ...]:
        if not isinstance(listed, list) or not all(type(t) is int and t >= 0 for t in listed):
            raise UserError(f"{self.source}: config.json has {listed} for {field}; give numbers")
        return tuple(listed)

    def _part(self, name: str) -> dict[str, Any]:
        """The settings under this name, if there are any."""
        part = self.config.get(name)
        return part if isinstance(part, dict) else {}


def hub(source: str) -> AbstractContextManager[None]:
    """Says what is being waited for where `source` is a hub id and the hub is slow."""
    slow = f"{source} from the hub (HF_HUB_OFFLINE=1 takes what is in the cache)"
    return nullcontext() if Path(source).is_dir() else waiting(slow)


@contextmanager
def from_hub(source: str) -> Iterator[None]:
    """Raises UserError, with what to do, for whatever fails while a hub id is fetched."""
    try:
        with hub(source):
            yield
    except Exception as e:  # of networks there are many
        raise UserError(
            f"cannot get {source} from the hub: {first_line(e).rstrip('.')}; check the network and "
            "HF_HUB_OFFLINE, run `hf auth login` for a gated model, or name a local folder"
        ) from e


def read(source: str | Path) -> Head:
    """Identify heads by config and tensor names alone. `source`: a folder or hub id.

    Raises UserError if they are in none of the known layouts."""
    bare, suffix = fitting.split(str(source))
    if suffix:
        raise UserError(f"{bare}: heads are read as they are; leave out {suffix}")
    files = _weights(bare)
    described = files[0].with_name("config.json")
    if not described.is_file():
        raise UserError(f"{source} has no config.json; point at a folder of {LAYOUTS}")
    with refusing(f"{source}: config.json is not JSON"):
        config = json.loads(described.read_text())
    if not isinstance(config, dict):
        raise UserError(f"{source}: config.json holds no settings")
    shapes: dict[str, tuple[int, ...]] = {}
    places: dict[str, Path] = {}
    for file in files:
        held = shapes_in(file)
        shapes |= held
        places |= dict.fromkeys(held, file)
    names = {ours: name for name in shapes if (ours := _our_name(name))}
    kind = _kind(names)
    if kind is None:
        raise UserError(
            f"{source} holds tensors such as {', '.join(sorted(shapes)[:3])}: none of {LAYOUTS}"
        )
    inner = config.get("transformer_layer_config")
    config = config | inner if isinstance(inner, dict) else config
    renamed = {ours: shapes[name] for ours, name in names.items()}
    placed = {ours: (places[name], name) for ours, name in names.items()}
    head = Head(kind, str(source), described.parent, config, renamed, placed)
    if kind in EAGLE3 and not head.fuses:  # vLLM leaves it out, too
        for name in ("fc.weight", "fc.bias"):
            renamed.pop(name, None)
            placed.pop(name, None)
    return head


def kind_in(folder: Path) -> str | None:
    """The kind of the heads in a folder; None if it is none, or holds none."""
    with suppress(UserError):
        return read(folder).kind if folder.is_dir() else None
    return None


def medusa_size(head: Head) -> tuple[int, int]:
    """The number of heads, and of residual blocks in each."""
    numbers = [tuple(map(int, name.split(".")[:2])) for name in head.shapes]
    return 1 + max(h for h, _ in numbers), max(block for _, block in numbers)


def default_taps(layers: int) -> tuple[int, ...]:
    """The states EAGLE-3's own code reads: numbers 2, L/2 and L - 3; never the last layer's."""
    return tuple(sorted(min(max(1, t), layers - 1) for t in (2, layers // 2, layers - 3)))


def states_read(head: Head, layers: int) -> tuple[int, ...]:
    """The hidden states that heads read of a target with so many layers (`Head.taps`)."""
    if head.kind in BLOCKS:
        return head.block_taps
    return head.taps(layers) if head.kind in EAGLE3 and head.fuses else (layers,)


def _our_name(name: str) -> str | None:
    if medusa := _MEDUSA.match(name):
        return medusa[1]
    return None if _NOT_OURS.match(name) else name


def _kind(names: dict[str, str]) -> str | None:
    """The kind, by tensor names. Renames those of a `speculators` head, or of transformers' own
    block drafter, in `names`; a layer for multi-token prediction has transformers' names."""
    if names and all(_MEDUSA.match(name) for name in names):
        return "medusa"
    if all(name.startswith("model.") or _OUTSIDE.match(name) for name in names):
        for name in [n for n in names if n.startswith("model.")]:
            names[name.removeprefix("model.")] = names.pop(name)
    if names and all(name.startswith("mtp_layers.0.") for name in names):
        for name in list(names):
            part, _, rest = name.removeprefix("mtp_layers.0.").partition(".")
            ours = f"{_MTP[part]}.{rest}" if part in _MTP else f"mtp_block.{part}.{rest}"
            names[ours] = names.pop(name)
        return "mtp"
    for ours, theirs in (("fc", "encoder.fc"), ("hidden_norm", "encoder.output_norm_enc")):
        if f"{theirs}.weight" in names:
            names[f"{ours}.weight"] = names.pop(f"{theirs}.weight")
    eagle3 = any(re.match(r"(midlayer|midlayer\.0|layers\.0)\.hidden_norm", n) for n in names)
    if "fc.weight" not in names and not eagle3:
        return None
    if "hidden_norm.weight" in names:
        for name in [n for n in names if re.match(r"(markov_w[12]|gate_proj)\.", n)]:  # ModelOpt
            names[f"markov_head.{name}"] = names.pop(name)
        own = {name.partition(".")[0] for name in names}
        return "dspark" if "markov_head" in own else "dflash" + "2" * ("candidate_selector" in own)
    if eagle3:
        for pattern, ours in _EAGLE3.items():
            for name in [n for n in names if re.match(pattern, n)]:
                if (renamed := re.sub(pattern, ours, name)) not in names:
                    names[renamed] = names.pop(name)
        return "peagle" if "mask_hidden" in names else "eagle3"
    return "eagle" if any(name.startswith("layers.0.") for name in names) else None


def _weights(source: str) -> list[Path]:
    """The file of weights, of the first kind that there is, in a folder or from a hub; or those
    that an index of this kind lists."""
    for pattern in _WEIGHTS:
        folder = Path(source)
        if not folder.is_dir():
            with from_hub(source):
                wanted = ["config.json", pattern, f"{pattern}.index.json", MASK_EMBEDDING]
                folder = Path(huggingface_hub.snapshot_download(source, allow_patterns=wanted))
        files = sorted(f for f in folder.glob(pattern) if f.name not in _BESIDE)
        there, listed = {f.name for f in files}, set[str]()
        for index in folder.glob(f"{pattern}.index.json"):
            with refusing(f"{source}: cannot read {index.name}", "download the heads again"):
                listed = {*json.loads(index.read_text())["weight_map"].values()}
            if there & listed and (missing := sorted(listed - there)):
                raise UserError(f"{source} lacks {missing[0]}, which {index.name} lists")
        if there & listed:
            return [f for f in files if f.name in listed]
        if len(files) == 1:
            return files
        if files:
            names = ", ".join(f.name for f in files)
            raise UserError(f"{source} has several weight files ({names}); heads come in one")
    looked = f"looked for {', '.join(_WEIGHTS)}"
    raise UserError(f"{source} has no weights ({looked}); point at a folder of {LAYOUTS}")


def shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a file, by their names there."""
    with refusing(f"cannot read {file.name}", "download or save the heads again"):
        if file.suffix == ".safetensors":
            with safe_open(file, "np") as opened:  # imports no torch
                names = opened.keys()
                return {name: tuple(opened.get_slice(name).get_shape()) for name in names}
        return {name: tuple(t.shape) for name, t in _unpickled(file).items()}


def _unpickled(file: Path) -> dict[str, Tensor]:
    import torch

    zipped = zipfile.is_zipfile(file)  # the format since torch 1.6; older files cannot be mapped
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as e:  # a hostile or broken pickle may raise anything
        raise UserError(
            f"{file.name} is a pickle that holds more than tensors, or is broken, and is not "
            "loaded: convert it to safetensors"
        ) from e
    tensors = isinstance(content, dict) and content.values()
    if tensors is False or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise UserError(f"{file.name} is not a dictionary of tensors")
    return content
