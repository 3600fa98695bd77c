"""Draft shapes, against the plainest reference there is."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from specexp.errors import UserError
from specexp.tree import Nodes, Tree


@st.composite
def trees(draw, most: int = 10) -> Tree:
    parents = [-1]
    for i in range(draw(st.integers(0, most - 1))):
        parents.append(draw(st.integers(max(parents[-1], 0), i)))
    return Tree(tuple(parents))


def path_to(tree: Tree, node: int) -> list[int]:
    path = [node]
    while tree.parents[path[0]] >= 0:
        path.insert(0, tree.parents[path[0]])
    return path


@pytest.mark.parametrize(
    "parents", [(), (0,), (-1, -1), (-1, 1), (-1, 0, 2), (-1, 0, 1, 0), (-1, 0, 5), (-1, 0, -1)]
)
def test_tree_rejects_parents_out_of_breadth_first_order(parents):
    with pytest.raises(UserError, match="breadth-first"):
        Tree(parents)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Tree.chain(-1), "gamma is -1; use 1 or more"),
        (lambda: Tree.chain(2.5), "gamma is 2.5; it must be a whole number"),
        (lambda: Tree.chain(10**12), "draft at most 1024 a round"),
        (lambda: Tree.branching(3, 0), "a node with 0 children: use 1 or more"),
        (lambda: Tree.branching(2.5), "the children of a node is 2.5; it must be a whole number"),
        (lambda: Tree.branching(10**6, 10**6), "draft at most 1024 a round"),
        (lambda: Tree.grown(2.5, 1), "the size of a tree is 2.5; it must"),
        (lambda: Tree.grown(10**12, 1), "draft at most 1024 a round"),
        (lambda: Tree((-1, 0.0)), "must be a tuple of whole numbers"),
        (lambda: Tree([-1, 0]), "must be a tuple of whole numbers"),
        (lambda: Tree((-1, 0, 1), -1), "and width -1; .* a whole number of 0 or more"),
        (lambda: Tree.parse("9" * 5000, 5), "tree '9999.* is unknown"),
    ],
)
def test_numbers_that_make_no_tree_are_refused(make, line):
    with pytest.raises(UserError, match=line):
        make()


def test_chain_and_branching_have_their_parents():
    assert Tree.chain(3).parents == (-1, 0, 1, 2)
    assert Tree.chain(0).is_chain
    assert Tree.chain(0).depth == 0
    assert Tree.branching(2, 2).parents == (-1, 0, 0, 1, 1, 2, 2)
    assert not Tree.branching(2).is_chain
    assert Tree.branching(1, 1) == Tree.chain(2)


@given(trees(), st.integers(-3, 10))
def test_cut_keeps_the_root_and_the_nodes_within_the_depth(tree, depth):
    cut, depth = tree.cut(depth), max(0, depth)
    assert len(cut) == sum(len(path_to(tree, i)) - 1 <= depth for i in range(len(tree)))
    assert cut.depth == min(depth, tree.depth)


def test_grown_tree_of_one_node_is_plain_decoding():
    assert Tree.grown(9, 3).cut(0) == Tree.chain(0)


@given(trees())
def test_levels_hold_the_nodes_of_each_depth(tree):
    for depth, level in enumerate(tree.levels):
        found = [i for i in range(len(tree)) if len(path_to(tree, i)) - 1 == depth]
        assert list(range(level.start, level.stop)) == found


@given(trees())
def test_tree_tensors_match_the_tree(tree):
    nodes = tree.nodes("cpu")
    for i in range(len(tree)):
        assert nodes.depth[0, i] == len(path_to(tree, i)) - 1
        assert nodes.ancestors[0, i].nonzero().flatten().tolist() == path_to(tree, i)
        children = [j for j in range(len(tree)) if tree.parents[j] == i]
        assert [c for c in nodes.children[0, i].tolist() if c >= 0] == children


class Largest(TorchDispatchMode):
    """`most`: the entries of the largest result."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.most = max(self.most, result.numel())
        return result


def test_wide_tree_takes_no_more_memory_than_a_deep_one():
    parents = torch.tensor([Tree.branching(60).parents]).clamp(min=0)
    with Largest() as seen:
        Nodes.of(parents, 1, 60)
    assert seen.most == 61 * 61


@given(st.lists(trees(6), min_size=2, max_size=3), st.data())
def test_rows_may_have_different_trees(rows, data):
    N = max(map(len, rows))
    padded = [Tree(t.parents + (t.parents[-1],) * (N - len(t)) if len(t) > 1 else (-1,) + (0,) * (N - 1)) for t in rows]  # fmt: skip # noqa: E501
    parents = torch.tensor([t.parents for t in padded]).clamp(min=0)
    deepest = max(t.depth for t in padded)
    width = max(t.parents.count(i) for t in padded for i in range(N))
    nodes = Nodes.of(parents, deepest, width)
    for row, tree in enumerate(padded):
        below = [[j for j in range(N) if tree.parents[j] == i] for i in range(N)]
        wanted = [children + [-1] * (width - len(children)) for children in below]
        assert nodes.children[row].tolist() == wanted
        assert [line.nonzero().flatten().tolist() for line in nodes.ancestors[row]] == [
            path_to(tree, i) for i in range(N)
        ]
    ok = torch.tensor([data.draw(st.lists(st.booleans(), min_size=N, max_size=N)) for _ in rows])
    path, n = nodes.accepted(ok)
    for row, tree in enumerate(padded):
        assert (path[row, : n[row] + 1].tolist(), int(n[row])) == follow(tree, ok[row].tolist())


def follow(tree: Tree, ok: list[bool]) -> tuple[list[int], int]:
    """The deepest node all of whose ancestors are accepted; the first of them at a tie."""
    reached = [i for i in range(len(tree)) if all(ok[j] for j in path_to(tree, i)[1:])]
    best = max(reached, key=lambda i: (len(path_to(tree, i)), -i))
    path = path_to(tree, best)
    return path, len(path) - 1


@given(trees(), st.data())
def test_accepted_path_is_the_deepest_from_the_root(tree, data):
    ok = data.draw(st.lists(st.booleans(), min_size=len(tree), max_size=len(tree)))
    path, n = tree.nodes("cpu").accepted(torch.tensor([ok]))
    assert (path[0, : n[0] + 1].tolist(), int(n[0])) == follow(tree, ok)
    assert path.shape == (1, tree.depth + 1)
    assert (path[0, n[0] + 1 :] == path[0, n[0]]).all()
