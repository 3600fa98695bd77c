"""The kernels of a GPU: CUDA graphs, fused passes and, where Triton runs, its kernels.

The references in torch take a launch for each of their operations, and a launch takes longer than
the work of a small one. A kernel has the arguments of its operation, whose docstring says what it
computes, and returns NotImplemented for inputs that it cannot read. The references run without
Triton and, after a warning that says why, where Triton or the GPU fails to run the kernels.
"""

import importlib.util
import logging
from collections.abc import Callable
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any

import torch

from specexp import engine, rules
from specexp.drafters.ngram import NGram
from specexp.drafters.suffix import Suffix
from specexp.errors import first_line
from specexp.fast import cuda_graphs, fused, fused_block, fused_eagle, lighter
from specexp.fast.private import keep_triton
from specexp.models import lm
from specexp.models.cache import Slots, store
from specexp.ops import kernel, switched_off
from specexp.sampling import Noise, Sampling, likeliest, ranked
from specexp.sequences import Sequences
from specexp.tree import Tree

__all__ = ["cuda_graphs", "fused_block", "fused_eagle"]  # importing them registers theirs

log = logging.getLogger("specexp")


def on_device(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, with the device of its first tensor current, because Triton launches there."""
    if torch.cuda.device_count() < 2:
        return run

    @wraps(run)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        placed = next(x for x in args if hasattr(x, "device"))  # a tensor, or what has tokens
        with torch.cuda.device_of(getattr(placed, "tokens", placed)):
            return run(*args, **kwargs)

    return guarded


def triton_runs(device: torch.device = torch.device("cuda")) -> bool:
    """Whether Triton's kernels run on this GPU; False with SPECEXP_NATIVE=off."""
    return not switched_off("SPECEXP_NATIVE") and _tried(device)


@cache
def _tried(device: torch.device) -> bool:
    """Whether the kernels of sampling run on this GPU, which are tried here; if not, a warning says
    why. Those of passes are tried when a model is loaded (fused.py)."""
    if not kernels or not torch.cuda.is_available():
        return False
    try:
        if (card := torch.cuda.get_device_capability(device)) < LEAST:
            raise RuntimeError("compute capability {}.{} is below {}.{}".format(*card, *LEAST))
        token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        text, tree = Sequences.empty(1, 4, device=device), Tree.chain(1).nodes(device)
        noise, logits = Noise(0), torch.zeros(1, 2, 2, device=device)
        p = on_device(laws.law)(Sampling(1.0), logits)
        draft = text.draft(tree, token, p)
        draft.keys = draft.tokens
        on_device(sampling.categorical)(noise, p, draft.keys, 1)
        warm = SimpleNamespace(rule=rules.Reject(), sampling=Sampling(1.0), rng=noise)
        on_device(gpu_rules.judged)(draft, SimpleNamespace(logits=logits), warm)
        torch.cuda.synchronize(device)
    except Exception as e:  # for example, Triton does not know the driver, compiler or card
        log.warning(UNUSED, first_line(e))
        return False
    return True


LEAST = 8, 0  # compute capability; below it products spill registers, and bfloat16 is emulated
UNUSED = "Triton's kernels are not used: %s"
kernels: dict[Any, Any] = {}
try:
    keep_triton()
    from specexp.fast.gpu import attention, laws, layers, paths, products, rows, sampling
    from specexp.fast.gpu import rules as gpu_rules
except Exception as e:  # there is no Triton, or it lacks what the kernels use
    if importlib.util.find_spec("triton") is not None:
        log.warning(UNUSED, first_line(e))
else:
    kernels = {
        fused.attention: attention.attention,
        fused.by_length_up_to: attention.by_length_up_to,
        fused.rotate_and_store: layers.rotate_and_store,
        lighter.rms_norm: layers.rms_norm,
        lighter.rotate: layers.rotate,
        lighter.gated: layers.gated,
        fused.add_norm: layers.add_norm,
        fused.swiglu: layers.swiglu,
        fused.product_add_norm: products.product_add_norm,
        fused.product_swiglu: products.product_swiglu,
        lm.product: products.product,
        likeliest: sampling.likeliest,
        ranked: sampling.ranked,
        Noise.categorical: sampling.categorical,
        Noise.uncoupled: sampling.uncoupled,
        Noise.draw: sampling.draw_few,
        Sampling.law: laws.law,
        rules.follow: paths.follow,
        engine.judged: gpu_rules.judged,
        Noise.keys: rows.keys,
        Sequences.commit: rows.commit,
        store: rows.store,
        Slots.keep: rows.keep,
        lm.spoil: rows.spoil,
        NGram.propose: rows.lookup,
        Suffix.propose: rows.vote,
    }
    for operation, run in kernels.items():
        kernel(operation, "cuda", ready=triton_runs)(on_device(run))


@kernel(lm.network, "cuda")
def network(module: Any, name: str, vocab: int) -> lm.Network:
    """The module's fused passes; if there are none and Triton's kernels run, its lighter passes."""
    net = fused.network(module, name, vocab)
    settled = net is not NotImplemented or not triton_runs(module.device)
    return net if settled else lighter.network(module, name, vocab)


def state() -> str:
    """In words, which kernels run on this GPU."""
    off = switched_off("SPECEXP_GRAPHS")
    kernels = "Triton's kernels" if triton_runs() else "no Triton"
    graphs = "no CUDA graphs (SPECEXP_GRAPHS=off)" if off else "CUDA graphs"
    return f"joined matrices, {kernels}, {graphs}"
