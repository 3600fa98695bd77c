"""The seam: references run unless a kernel is registered, ready and takes its input."""

import sys

import pytest
import torch

from specexp import ops


@pytest.fixture
def home(monkeypatch, tmp_path):
    """A file in which kernels for a CPU would be looked for; not there yet."""
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"kernels_{abs(hash(tmp_path))}"
    monkeypatch.setitem(ops.KERNELS, "cpu", name)
    yield tmp_path / f"{name}.py"
    sys.modules.pop(name, None)


class Box:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    @property
    def device(self) -> torch.device:
        return self.x.device

    @ops.op
    def doubled(self, plus: int = 0) -> torch.Tensor:
        """Twice x."""
        return self.x * 2 + plus


def test_method_runs_kernel_of_its_objects_device(home):
    @ops.kernel(Box.doubled, "cpu")
    def doubled(self: Box, plus: int = 0) -> torch.Tensor:
        return torch.tensor(100 + plus)

    assert Box(torch.ones(1)).doubled(plus=3) == 103
    assert Box(torch.ones(1, device="meta")).doubled().device.type == "meta"
    assert Box.doubled.__doc__ == "Twice x."
    assert Box.doubled.__wrapped__(Box(torch.ones(1))) == 2


def test_first_argument_with_a_device_decides(home):
    @ops.op
    def scaled(factor: int, x: torch.Tensor, y: torch.Tensor) -> str:
        return "reference"

    ops.kernel(scaled, "cpu")(lambda factor, x, y: "cpu")
    ops.kernel(scaled, "meta")(lambda factor, x, y: "meta")
    here, there = torch.ones(1), torch.ones(1, device="meta")
    assert scaled(2, here, there) == "cpu"
    assert scaled(2, there, here) == "meta"


@ops.op
def named(x: torch.Tensor) -> str:
    return "reference"


@pytest.fixture
def unnamed():
    yield
    ops.OPS[named].kernels.clear()
    ops.forget()


def test_kernel_is_imported_at_the_first_call(home, unnamed):
    home.write_text(
        "from specexp import ops\nfrom test_ops import named\n"
        "@ops.kernel(named, 'cpu')\ndef kernel(x): return 'kernel'\n"
    )
    assert named(torch.ones(1)) == "kernel"
    assert named(torch.ones(1, device="meta")) == "reference"


def test_no_folder_of_kernels_runs_references(home, unnamed):
    assert named(torch.ones(1)) == "reference"


def test_missing_import_of_a_kernel_is_an_error(home, unnamed):
    home.write_text("import a_module_that_is_not_there\n")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        named(torch.ones(1))


def test_specexp_fast_off_runs_references(home, unnamed, monkeypatch):
    ops.kernel(named, "cpu")(lambda x: "kernel")
    monkeypatch.setenv("SPECEXP_FAST", "off")
    assert named(torch.ones(1)) == "reference"
    monkeypatch.delenv("SPECEXP_FAST")
    ops.forget()
    assert named(torch.ones(1)) == "kernel"


def test_kernel_that_is_not_ready_does_not_run(home, unnamed):
    ops.kernel(named, "cpu", ready=lambda device: False)(lambda x: "kernel")
    assert named(torch.ones(1)) == "reference"


def test_reference_runs_what_the_kernel_refuses(home, unnamed):
    ops.kernel(named, "cpu")(lambda x: "kernel" if x.is_contiguous() else NotImplemented)
    assert named(torch.ones(2, 2)) == "kernel"
    assert named(torch.ones(2, 2).T[:1]) == "reference"
