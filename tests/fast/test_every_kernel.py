"""Every kernel gives what its torch reference gives, on inputs of every kind."""

import importlib
import itertools
from contextlib import nullcontext

import pytest
import torch
from conftest import one_in
from support.bounds import inside
from support.inputs import INPUTS, LAST, SHAPES, Dice, differing, key_of
from support.references import references

from specexp import engine, ops
from specexp.drafters.suffix import Suffix
from specexp.fast import fused, lighter
from specexp.models import cache, lm, load
from specexp.models.heads import block, eagle
from specexp.models.scans import Scan, Walk
from specexp.recording import recorder_for
from specexp.rules import Block, Reject
from specexp.sampling import ACCEPT, TOKEN, Certain, Noise, Sampling, mix, ranked
from specexp.sequences import Draft, Sequences
from specexp.tree import Tree

# networks and recorders, which are compared whole: test_fused.py, test_cuda_graphs.py, ...
WHOLE = {
    lm.network, lm.fill, block.network, eagle.network, load.place_weights, recorder_for,
    fused.by_length_up_to,
}  # fmt: skip
WITH_GPU = torch.cuda.is_available()
SEEDS = {"cpu": 400, "cuda": 30, "interpreted": 30}  # of a GPU most are compiled anew
MARKS = {"cuda": "cuda", "interpreted": "interpreter"}
HANDED_OVER = (  # by modules
    cache.store, lighter.rotate, lighter.rms_norm, lighter.gated, fused.attention, lm.product,
)  # fmt: skip
SCANS = Scan.convolution, Scan._scan, Walk.convolution, Walk.recurrence
COMPILED = lm.product, lm.spoil, *SCANS
SLOWEST = {
    Noise.categorical,
    Noise.uncoupled,
    engine.judged,
    Suffix.propose,
}  # of the interpreted


def registered() -> list[object]:
    """A case for every kernel that runs on this machine. Those of a GPU that is not there are run
    by Triton's interpreter, on a CPU."""
    cases = []
    for kernel in ("cpu", "cuda"):
        ops.kernels_of(torch.device(kernel))
        how = kernel if kernel == "cpu" or WITH_GPU else "interpreted"
        for call, op in ops.OPS.items():
            if call in WHOLE or kernel not in op.kernels:
                continue
            if how == "interpreted" or op.kernels[kernel][1](torch.device(kernel)):
                marks = [getattr(pytest.mark, MARKS[how])] if how in MARKS else []
                name = f"{call.__qualname__}-{how}"
                cases.append(pytest.param(call, kernel, how, id=name, marks=marks))
    return cases


@pytest.mark.parametrize(("operation", "kernel", "how"), registered())
def test_kernel_matches_reference(operation, kernel, how):
    assert operation in INPUTS, "a new kernel: say in INPUTS what it is compared on"
    seeds = SEEDS[how] // (1 + 2 * (how == "interpreted" and operation in SLOWEST))
    with references(), inside() if how == "interpreted" else nullcontext():
        differ, taken = differing(
            operation, kernel, "cuda" if how == "cuda" else "cpu", range(seeds)
        )
    assert differ == []
    assert taken > seeds / 6, "the kernel refuses most of what it is compared on"


@pytest.mark.triton
@pytest.mark.parametrize(
    ("operation", "many"),
    [
        *one_in(3, itertools.product((Sampling.law, engine.judged), (1, 4096))),
        *((operation, 1) for operation in (ranked, Noise.draw, Noise.uncoupled)),
    ],
)
def test_vocabulary_read_in_blocks_matches_reference(operation, many, monkeypatch):
    """Blocks of 8 tokens, of which a program takes several or one; what is not written is not
    read."""
    laws = importlib.import_module("specexp.fast.gpu.laws")
    monkeypatch.setattr("specexp.sampling.PART", 8)
    for name, value in {"BLOCK": 8, "MANY": many}.items():
        monkeypatch.setattr(laws, name, value)
    device = "cuda" if WITH_GPU else "cpu"
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what is only made room for
    try:
        with references(), nullcontext() if WITH_GPU else inside():
            differ, taken = differing(operation, "cuda", device, range(100, 104))
    finally:
        torch.use_deterministic_algorithms(False)
    assert differ == []
    assert taken > 1


@pytest.mark.triton
@pytest.mark.parametrize("cuts", one_in(4, SHAPES), ids=str)
def test_law_of_a_row_is_that_of_the_row_alone(cuts, monkeypatch):
    """To the bit, though many rows are read by fewer programs each, and bounded in more passes."""
    laws = importlib.import_module("specexp.fast.gpu.laws")
    for name, value in {"BLOCK": 8, "MANY": 3}.items():
        monkeypatch.setattr(laws, name, value)
    device = "cuda" if WITH_GPU else "cpu"
    logits = (4 * torch.randn(3, 40, generator=torch.Generator().manual_seed(0))).to(device)
    logits[:, ::9] = logits[:, 1:2]  # equals, at which bounds cut
    sampling = Sampling(0.7, **cuts)
    alone = [laws.law(sampling, row[None]) for row in logits]
    assert torch.equal(laws.law(sampling, logits), torch.cat(alone))


@pytest.mark.parametrize(
    ("operation", "kernel"),
    [
        *(pytest.param(operation, "cuda", marks=pytest.mark.triton) for operation in HANDED_OVER),
        *(pytest.param(operation, "cpu", marks=pytest.mark.compiler) for operation in COMPILED),
    ],
)
def test_kernel_refuses_what_its_reference_cannot_take(operation, kernel):
    """A module decides on these shapes, and a kernel would read beyond them."""
    run, _ = ops.OPS[operation].kernels[kernel]
    device, tried = "cuda" if kernel == "cuda" and WITH_GPU else "cpu", 0
    for seed, at in itertools.product(range(12), range(8)):
        case = INPUTS[operation](Dice(seed, device))
        given = list(case.args)
        x = given[at] if at < len(given) else None
        for dim in range(x.dim() if torch.is_tensor(x) else 0):
            given[at] = torch.cat([x, x.narrow(dim, 0, 1)], dim)
            args = [y.clone() if torch.is_tensor(y) else y for y in given]
            with references():
                try:
                    ops.OPS[operation].reference(*args)
                except (RuntimeError, IndexError, ValueError):
                    tried += 1
                    assert run(*given) is NotImplemented, (seed, at, dim)
    assert tried >= 12


# --- what holds of kernels alone ------------------------------------------------------------------


@pytest.mark.parametrize("last", [(20, 21), (21, 20)])
def test_votes_of_a_long_text_are_counted_one_by_one(last):
    """Two tokens that have followed as often, the last time three places apart."""
    text = [t for said in (last * 6666) for t in (1, 2, said)] + [1, 2]
    seqs, tree = Sequences.of([text], 4, slack=4), Tree.branching(2)
    found = []
    for off in (False, True):
        with references(off):
            found.append(Suffix(64, 2).propose(seqs, tree, Certain()).tokens.tolist())
    assert found == [[[2, *reversed(last)]]] * 2


@pytest.mark.parametrize(
    ("odd", "size"),
    one_in(3, itertools.product((0.0, -0.0, -torch.inf, torch.nan), (3, 16, 1000, 5000))),
)
@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param("cpu", marks=pytest.mark.compiler),
        pytest.param("cuda", marks=pytest.mark.triton),
    ],
)
def test_first_of_equals_is_ranked_first(kernel, size, odd):
    """5000 are several blocks, and no number of groups; the very last may be the largest."""
    w = torch.randint(-2, 3, (2, 4, size), generator=torch.manual_seed(0)).float()
    w[torch.rand(w.shape) < 0.4 if size < 5000 else w == 2] = odd
    w[0, :2, -1] = 9
    wanted = w.sort(descending=True, stable=True).indices
    w = w.to("cuda" if kernel == "cuda" and WITH_GPU else "cpu")
    for k in (2, 3, min(size, 16)):
        assert torch.equal(ops.OPS[ranked].kernels[kernel][0](w, k).cpu(), wanted[..., :k])


def decided(noise: Noise, keys: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """[B] bool: is a chosen draft token kept of which the target is as sure as p [B]?"""
    B, nodes = len(p), Tree.chain(1).nodes("cpu")
    law = torch.stack([p, 1 - p], 1)[:, None].expand(-1, 2, -1).contiguous()
    text = Sequences.empty(B, 2)
    draft = Draft(torch.zeros(B, 2, dtype=torch.int64), nodes, text)
    draft.keys = keys[:, None].expand(-1, 2).contiguous()
    return Reject()(draft, law, noise).n == 1


@pytest.mark.compiler
def test_uniforms_match_to_the_last_bit():
    """A coin falls heads at its uniform, and tails at the number before."""
    noise = Noise(3)
    odd = [key_of(noise, ACCEPT, 0, bits) for bits in (0, 1, 5, LAST >> 1, (LAST >> 2) + 1)]
    keys = torch.cat([mix(torch.arange(100_000)), torch.tensor(odd)])
    u = noise.uniform(keys, ACCEPT, torch.zeros(1, dtype=torch.int64))[:, 0]
    assert u[-5:].tolist()[0] == 2.0**-64
    assert u[-2] == 1
    assert decided(noise, keys, u).all()
    assert not decided(noise, keys, u.nextafter(torch.zeros(1))).any()


@pytest.mark.compiler
@pytest.mark.parametrize("V", [1, 15, 16, 1000])
def test_arrivals_are_exact_but_for_rounding(V):
    noise, keys = Noise(1), mix(torch.arange(100_000 // V))
    u = noise.uniform(keys, TOKEN, torch.arange(V)).clamp(max=1 - 2**-24).double()
    w = 1 - torch.rand(len(keys), V, generator=torch.manual_seed(0))  # never 0
    off = noise.race(w, keys, TOKEN).double() * -torch.log1p(-u) / w.double() - 1
    assert off.abs().max() < 3e-7
    assert not noise.race(0 * w, keys, TOKEN).any()


@pytest.mark.compiler
def test_verdicts_do_not_depend_on_rows_or_threads():
    torch.manual_seed(0)
    V, noise, threads = 33_001, Noise(0), torch.get_num_threads()
    nodes, seqs = Tree.chain(1).nodes("cpu"), Sequences.of([[1], [2], [3]], 3, slack=1)
    logits, drafted = torch.randn(3, 2, V), torch.randint(0, V, (3, 1))

    def made(rows: slice) -> list[torch.Tensor]:
        few = seqs.window(rows.start, rows.stop - rows.start)
        draft = few.draft(nodes, drafted[rows])
        p = Sampling(0.8, top_p=0.9).law(logits[rows])
        verdict = Reject()(draft, p, noise)
        return [p, noise.race(p, draft.keys, TOKEN), verdict.n, verdict.new]

    wanted = made(slice(0, 3))
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for rows in (slice(0, 3), slice(1, 2), slice(1, 3)):
                pairs = zip(made(rows), wanted, strict=True)
                assert all(torch.equal(some, all_[rows]) for some, all_ in pairs)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.compiler
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_broken_logits_leave_laws_of_other_rows(bad):
    logits = torch.randn(3, 20, generator=torch.manual_seed(0))
    good = logits.clone()
    logits[1, 4] = bad
    for shape in SHAPES:
        law = Sampling(0.7, **shape).law
        assert law(logits)[1].isnan().any()
        assert torch.equal(law(logits)[[0, 2]], law(good)[[0, 2]])


@pytest.mark.compiler
@pytest.mark.parametrize("rule", [Reject(), Block()])
def test_draft_token_outside_vocabulary_is_refused(rule):
    seqs = Sequences.of([[1], [2]], 3, slack=1)
    draft = seqs.draft(Tree.chain(1).nodes("cpu"), torch.tensor([[0], [5]]))
    with pytest.raises(IndexError, match="a draft token is outside the vocabulary of 5 tokens"):
        rule(draft, torch.full((2, 2, 5), 0.2), Noise(0))


@pytest.mark.compiler
@pytest.mark.parametrize("rule", [Reject(), Block()])
def test_q_of_another_vocabulary_is_refused(rule):
    seqs = Sequences.of([[1], [2]], 3, slack=1)
    drafted, q = torch.tensor([[0], [3]]), torch.full((2, 2, 4), 0.25)
    draft = seqs.draft(Tree.chain(1).nodes("cpu"), drafted, q)
    with pytest.raises(RuntimeError, match="must match the size"):
        rule(draft, torch.full((2, 2, 5), 0.2), Noise(0))


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_state_of_every_device_is_said_in_words(device):
    assert ops.state(torch.device(device))
