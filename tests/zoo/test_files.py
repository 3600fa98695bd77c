"""Files and folders are written whole or not at all."""

import pytest

from specexp.errors import UserError
from specexp.zoo import files


def contents(folder):
    return {
        p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*") if p.is_file()
    }


@pytest.mark.parametrize("folder", [False, True])
def test_half_a_file_or_folder_never_takes_the_place_of_a_whole_one(tmp_path, folder):
    path = tmp_path / "below" / "one.txt"

    def make(text, fails=False):
        with files.whole(path) as partial:
            assert not fails or path.exists(), "the old one is there until the new one is whole"
            if folder:
                partial.mkdir()
            (partial / f"{text}.txt" if folder else partial).write_text(text)
            if fails:
                raise KeyboardInterrupt

    make("old")
    before = contents(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        make("half", fails=True)
    assert contents(tmp_path) == before
    make("new")
    assert list(contents(tmp_path).values()) == ["new"]
    assert list(path.parent.iterdir()) == [path]


def test_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*file/below: File exists"):
        files.write(tmp_path / "file" / "below", "text")
