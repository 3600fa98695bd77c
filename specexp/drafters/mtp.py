"""Draft with the layer for multi-token prediction that a target's checkpoint has (native MTP).

(DeepSeek-AI 2024, DeepSeek-V3, section 2.2.) It drafts as an EAGLE layer does, from the target's
last hidden state and the next token, and was trained with the target: nothing has to be trained or
fetched. It differs from EAGLE's in two norms before the projection and a block of the target's own
class. Which tensors of a checkpoint belong to it transformers knows for every family (`MtpModel`).
Embeddings, LM head and rotary positions are the target's. A checkpoint may have several layers, one
for each place ahead; here the first serves all places. A layer that was trained further, to draft
several tokens (Cai et al. 2025, FastMTP, arXiv 2509.18362), may take its place.
"""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from specexp.drafters import Prepared, Request
from specexp.drafters.eagle import EagleLayer
from specexp.errors import UserError, refusing
from specexp.models.heads import layouts
from specexp.models.heads.borrowing import Borrowing
from specexp.models.heads.eagle import EagleShape
from specexp.models.heads.layouts import Head
from specexp.models.heads.weights import insist_on_finite, insist_on_kind, insist_on_tensors
from specexp.models.lm import LM
from specexp.models.servable import cache_name

# the fields that count these layers: transformers', Qwen 3.5's, DeepSeek's
COUNTS = ("num_mtp_layers", "mtp_num_hidden_layers", "num_nextn_predict_layers")
FULL = "full_attention"


class Mtp(Borrowing):
    """The first of the layers of `model`, a transformers `MtpModel`, in the interface of
    `eagle.Eagle`: features [B, n, E] are the target's, as its LM head reads them, or its own."""

    def __init__(self, model: Any, taps: tuple[int, ...]) -> None:
        super().__init__()
        self.config = copy.copy(model.config)
        self.config.num_hidden_layers = 1
        self.shape = EagleShape("mtp", self.config, 0, taps)
        self.layer = model.layers[0]
        model.layers = model.layers[:1]  # the others are not held in memory
        self.norm = model.shared_post_norm if model.use_shared_post_norm else nn.Identity()
        self.kept = cache_name(self.layer)
        self.borrowed = (model,)

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Any, features: Tensor,
        cache: Any = None, logits_to_keep: int = 0, **_: Any,
    ) -> SimpleNamespace:  # fmt: skip
        model = self.borrowed[0]
        embedded = model.embed_tokens(input_ids).to(features.dtype)
        kind = {"layer_type": FULL} if getattr(model, "has_per_layer_rope", False) else {}
        rotary = model.rotary_emb(embedded, position_ids, **kind)
        features = self.norm(self.layer(
            embedded, features, position_embeddings=rotary, position_ids=position_ids,
            attention_mask=attention_mask, **{self.kept: cache},
        ))  # fmt: skip
        logits = model._project_to_logits(features[:, -logits_to_keep:])
        return SimpleNamespace(logits=logits, hidden_states=(features,))


def _with_layers(config: Any, least: int = 0) -> Any:
    """A copy of a target's config in which its layers for multi-token prediction, or `least` of
    them, have the names that `MtpModel` reads; None if there are none."""
    count = next((n for name in COUNTS if (n := getattr(config, name, None))), least)
    if not isinstance(count, int) or count < 1:
        return None
    config = copy.deepcopy(config)
    config.num_mtp_layers = count
    for kinds, usual in (("layer_types", FULL), ("mlp_layer_types", "sparse")):
        if getattr(config, kinds, None) and not getattr(config, f"mtp_{kinds}", None):
            setattr(config, f"mtp_{kinds}", [usual] * count)
    return config


def check(config: Any, target: str, folder: str) -> None:
    """Raise UserError, before weights are loaded, for a target without such a layer, or with one
    that is not run here. config: the target's, which need not count the layer if a file has it
    (Qwen 3 Next); folder: its own or a hub id."""
    counted, own = _with_layers(config) is not None, _with_layers(config, 1)
    files = [*Path(folder).glob("*.safetensors")] if folder else []
    class_of = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    ignored = getattr(class_of, "_keys_to_ignore_on_load_unexpected", None) or []
    none = f"{target} has no layer for multi-token prediction: use another drafter"
    if not counted and not (files and ignored):
        raise UserError(none)
    if not hasattr(MtpModel, "get_mtp_weights_regex"):
        raise UserError(
            "layers for multi-token prediction need transformers 5.20 or newer, and here is "
            f"{transformers.__version__}: pip install -U transformers, or use another drafter"
        )
    kinds = {*(getattr(own, "mtp_layer_types", None) or [FULL])}
    if kinds != {FULL}:
        raise UserError(
            f"{target}: its layer for multi-token prediction has {' and '.join(sorted(kinds))}, "
            "which is not run here: use another drafter"
        )
    says = SimpleNamespace(config=own, _keys_to_ignore_on_load_unexpected=ignored)
    with refusing(f"{target} has no layer for multi-token prediction"):
        theirs = MtpModel.get_mtp_weights_regex(says)
    if files and not any(theirs.search(n) for file in files for n in layouts.shapes_in(file)):
        lost = f"{target}: config.json names a layer for multi-token prediction, and the weights "
        lost += "have none: take a checkpoint that has it, or another drafter"
        raise UserError(lost if counted else none)


def check_trained(head: Head, config: Any, target: str) -> None:
    """Raise UserError, before weights are loaded, for heads that are no such layer for a target
    with this config."""
    insist_on_kind(head, "mtp")
    with refusing(f"{head.subject}; {target} has no place for such a layer"), torch.device("meta"):
        model = _untrained(AutoModelForCausalLM.from_config(config))
    if model.use_shared_post_norm:
        raise UserError(
            f"{head.subject}; the norm behind such layers of {target} is not among these tensors: "
            "use mtp, its own layer, or another drafter"
        )
    insist_on_tensors(head.subject, model.layers[0], head.shapes)


def named(module: Any) -> Any:
    """The same target, with the same weights, with a config that `MtpModel` can read."""
    other = copy.copy(module)
    other.config = _with_layers(module.config, 1)
    return other


def _untrained(module: Any) -> MtpModel:
    return MtpModel(named(module), 1)


def load(module: Any, target: str) -> Mtp:
    """The layer of a loaded target, a transformers model. Call `check` first. Raises UserError for
    weights that are missing."""
    on = {"": module.device}
    with refusing(f"cannot load the layer for multi-token prediction of {target}"):
        model = MtpModel.from_pretrained(named(module), device_map=on)
    return _ready(model, module)


def load_trained(head: Head, module: Any) -> Mtp:
    """The layer of `head` for a loaded target. Call `check_trained` first. Raises UserError for
    weights that are not finite."""
    model = _untrained(module)
    model.layers.load_state_dict({f"0.{name}": tensor for name, tensor in head.tensors().items()})
    insist_on_finite(head.source, model.layers[0])
    model.layers.to(module.device, module.dtype)
    return _ready(model, module)


def _ready(model: MtpModel, module: Any) -> Mtp:
    net = Mtp(model, (module.config.get_text_config().num_hidden_layers,))
    return net.eval().requires_grad_(False)


def prepare(request: Request) -> Prepared:
    """`mtp`: the target's own; `mtp:NAME`: trained further, a folder or hub id in the layout of
    `speculators`."""
    head: Head | None = None
    if request.argument:
        head = layouts.read(request.source(request.method, request.argument))
        check_trained(head, request.config, request.target)
    else:
        check(request.config, request.target, request.folder)

    def make(target: LM) -> EagleLayer:
        layer = load_trained(head, target.module) if head else load(target.module, target.name)
        return EagleLayer(layer, target, request.sampling)

    return Prepared(make, draws=True, taps=1)
