"""Checkpoints of EAGLE heads as trainers publish them, and what they draft by a definition of its
own: plain products over the whole text, by the tensors of one canonical naming."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

E, HIDDEN, DRAFTED, EPS, THETA = 32, 64, 40, 1e-5, 5000.0  # widths, and tokens that it can draft
HEADS, KEYS, HEAD = 4, 2, 8


@dataclass
class Published:
    """reads: the target's states; width: of the layers; `bias`: of which projections; `norms`:
    those that are on; `normed`: queries and keys are normed; `own`: `embed_tokens`, `lm_head`."""

    reads: tuple[int, ...] = (2, 6, 9)
    layers: int = 1
    width: int = E
    bias: str = ""
    norms: tuple[str, ...] = ()
    normed: bool = False
    own: tuple[str, ...] = ("lm_head",)
    drafted: int = DRAFTED
    fused: bool = True
    concatenates: bool = True
    act: Any = F.silu
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def made(self, vocab: int) -> dict[str, Tensor]:
        """Random tensors, by canonical names."""
        torch.manual_seed(7)
        W, wide = self.width, len(self.reads) * E
        shapes: dict[str, tuple[int, ...]] = {}
        for i in range(self.layers):
            here, own = f"layers.{i}.", f"layers.{i}.self_attn."
            reads = 2 * W if self.concatenates and not i else W
            shapes |= {
                f"{own}q_proj.weight": (HEADS * HEAD, reads),
                f"{own}k_proj.weight": (KEYS * HEAD, reads),
                f"{own}v_proj.weight": (KEYS * HEAD, reads),
                f"{own}o_proj.weight": (W, HEADS * HEAD),
                f"{here}mlp.gate_proj.weight": (HIDDEN, W),
                f"{here}mlp.up_proj.weight": (HIDDEN, W),
                f"{here}mlp.down_proj.weight": (W, HIDDEN),
                f"{here}post_attention_layernorm.weight": (W,),
            }  # fmt: skip
            if self.concatenates or i:
                shapes[f"{here}input_layernorm.weight"] = (W,)
            if self.concatenates and not i:
                shapes[f"{here}hidden_norm.weight"] = (W,)
            if self.normed:
                shapes |= {f"{own}{part}_norm.weight": (HEAD,) for part in "qk"}
            parts = [f"{own}{part}_proj" for part in self.bias if part in "qkvo"]
            parts += [f"{here}mlp.{p}_proj" for p in ("gate", "up", "down") if "m" in self.bias]
            shapes |= {f"{part}.bias": (shapes[f"{part}.weight"][0],) for part in parts}
        if self.fused:
            shapes["fc.weight"] = (W, wide if self.concatenates else 2 * W)
        if "f" in self.bias:
            shapes["fc.bias"] = (W,)
        if self.concatenates:
            shapes["norm.weight"] = (W,)
        if "norm_before_fc" in self.norms:
            shapes["input_norm.weight"] = (wide,)
        if "fc_norm" in self.norms:
            shapes |= {f"fc_norm.{i}.weight": (E,) for i in range(len(self.reads))}
        if "embed_tokens" in self.own:
            shapes["embed_tokens.weight"] = (vocab, W)
        if "lm_head" in self.own:
            shapes["lm_head.weight"] = (self.drafted or vocab, W)
        self.tensors = {n: torch.randn(s) / 4 + ("norm" in n) for n, s in shapes.items()}
        if self.drafted and "lm_head" in self.own:
            ids = torch.arange(self.drafted) * 3 + 1
            t2d = torch.zeros(vocab, dtype=torch.bool)
            self.tensors |= {"d2t": ids - torch.arange(self.drafted)}
            self.tensors |= {"t2d": t2d.index_fill(0, ids, True)}
        return self.tensors

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.tensors[f"{name}.weight"].to(x.dtype)
        return weight * x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()

    def _linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.tensors[f"{name}.weight"].to(x.dtype).T
        bias = self.tensors.get(f"{name}.bias")
        return y if bias is None else y + bias.to(x.dtype)

    def _layer(self, i: int, read: Tensor, residual: Tensor) -> Tensor:
        own, n = f"layers.{i}.self_attn.", len(read)
        angles = torch.arange(n)[:, None] / THETA ** (torch.arange(0, HEAD, 2) / HEAD)
        cos, sin = (
            part.to(read.dtype).repeat(1, 2)[:, None] for part in (angles.cos(), angles.sin())
        )

        def heads(part: str) -> Tensor:
            x = self._linear(f"{own}{part}_proj", read).view(n, -1, HEAD)
            if part == "v":
                return x
            x = self._norm(f"{own}{part}_norm", x) if self.normed else x
            left, right = x.chunk(2, -1)
            return x * cos + torch.cat([-right, left], -1) * sin

        q, k, v = heads("q"), heads("k"), heads("v")
        k, v = (x.repeat_interleave(HEADS // KEYS, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD**0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = residual + self._linear(f"{own}o_proj", mixed)
        y = self._norm(f"layers.{i}.post_attention_layernorm", x)
        gated = self.act(self._linear(f"layers.{i}.mlp.gate_proj", y))
        up = self._linear(f"layers.{i}.mlp.up_proj", y)
        return x + self._linear(f"layers.{i}.mlp.down_proj", gated * up)

    def _fuse(self, states: Tensor) -> Tensor:
        if not (self.fused and self.concatenates):
            return states
        if "norm_before_fc" in self.norms:
            states = self._norm("input_norm", states)
        if "fc_norm" in self.norms:
            parts = states.split(E, -1)
            states = torch.cat([self._norm(f"fc_norm.{i}", x) for i, x in enumerate(parts)], -1)
        return self._linear("fc", states)

    @torch.no_grad()
    def says(self, target: Any, text: list[int], count: int) -> list[int]:
        """The draft tokens after a text. The feature of a token goes with the next token."""
        states = states_of(target, text[:-1], self.reads)
        embed = self.tensors.get("embed_tokens.weight", target.get_input_embeddings().weight)
        head = self.tensors.get("lm_head.weight", target.get_output_embeddings().weight)
        features, tokens = self._fuse(states), text[1:]
        for _ in range(count):
            x = embed[tokens].to(features.dtype)
            if self.concatenates:
                normed = self._norm("layers.0.hidden_norm", features)
                read = torch.cat([self._norm("layers.0.input_layernorm", x), normed], -1)
                before = "norm_before_residual" in self.norms
                x = self._layer(0, read, normed if before else features)
            else:
                x = self._linear("fc", torch.cat([x, features], -1))
                x = self._layer(0, x, x)
            for i in range(1, self.layers):
                x = self._layer(i, self._norm(f"layers.{i}.input_layernorm", x), x)
            said = self._norm("norm", x) if self.concatenates else x
            best = int((said[-1] @ head.to(x.dtype).T).argmax())
            tokens = [
                *tokens,
                best + int(self.tensors["d2t"][best]) if "d2t" in self.tensors else best,
            ]
            made = said if "norm_output" in self.norms else x
            features = torch.cat([features, made[-1:]])
        return tokens[-count:]


@torch.no_grad()
def states_of(target: Any, text: list[int], reads: tuple[int, ...]) -> Tensor:
    """[tokens, reads * E]: state t is what layer t reads, L + 1 what the last norm makes of L."""
    seen = []
    layers = target.model.layers
    hooks = [layer.register_forward_pre_hook(lambda _, x: seen.append(x[0][0])) for layer in layers]
    hooks += [target.model.norm.register_forward_pre_hook(lambda _, x: seen.append(x[0][0]))]
    hooks += [target.model.norm.register_forward_hook(lambda *x: seen.append(x[2][0]))]
    target(torch.tensor([text]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.cat([seen[t] for t in reads], -1)
