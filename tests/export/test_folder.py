"""The staged output folder: whole or not at all, and an existing folder is replaced only when asked to."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mla_convert.errors import OutputError, VerificationError
from mla_convert.export.folder import check_output, staged_folder


def _converted(folder: Path, text: str = "old") -> Path:
    folder.mkdir(parents=True)
    (folder / "conversion.json").write_text("{}")
    (folder / "weights").write_text(text)
    return folder


def test_the_folder_appears_when_the_block_succeeds(tmp_path: Path) -> None:
    out = tmp_path / "new" / "parents" / "out"
    with staged_folder(out, overwrite=False) as staged:
        assert not out.exists()
        assert staged.parent == out.parent
        (staged / "file").write_text("x")
    assert (out / "file").read_text() == "x"
    assert list(out.parent.iterdir()) == [out]


def test_its_mode_is_that_of_any_new_folder(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    with staged_folder(tmp_path / "out", overwrite=False):
        pass
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("failure", [ValueError("x"), KeyboardInterrupt(), OutputError("x", "y")])
def test_a_failing_block_leaves_nothing(tmp_path: Path, failure: BaseException) -> None:
    def interrupted() -> None:
        with staged_folder(tmp_path / "new" / "parents" / "out", overwrite=False) as staged:
            (staged / "file").write_text("x")
            raise failure

    with pytest.raises(type(failure)):
        interrupted()
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_refused_before_any_work(tmp_path: Path) -> None:
    out = _converted(tmp_path / "out")
    with pytest.raises(OutputError, match="exists") as caught, staged_folder(out, overwrite=False):
        pytest.fail("the block ran")
    assert "--overwrite" in caught.value.remedy
    assert (out / "weights").read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


def test_overwrite_replaces_the_whole_folder(tmp_path: Path) -> None:
    out = _converted(tmp_path / "out")
    with staged_folder(out, overwrite=True) as staged:
        (staged / "conversion.json").write_text("new")
        assert (out / "weights").read_text() == "old"
    assert [path.name for path in out.iterdir()] == ["conversion.json"]
    assert list(tmp_path.iterdir()) == [out]


def test_overwrite_keeps_the_old_folder_when_the_block_fails(tmp_path: Path) -> None:
    out = _converted(tmp_path / "out")
    with pytest.raises(ValueError, match="broken"), staged_folder(out, overwrite=True):
        raise ValueError("broken")
    assert (out / "weights").read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


def test_overwrite_restores_the_old_folder_when_the_new_one_cannot_move_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = _converted(tmp_path / "out")
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError(errno.EBUSY, "Device or resource busy")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OutputError, match="busy"), staged_folder(out, overwrite=True) as staged:
        (staged / "file").write_text("x")
    assert (out / "weights").read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


def test_overwrite_spares_what_it_did_not_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    with pytest.raises(OutputError, match="not a folder"):
        check_output(tmp_path / "file", overwrite=True)
    with pytest.raises(OutputError, match=r"conversion\.json"):
        check_output(tmp_path / "home", overwrite=True)
    (tmp_path / "empty").mkdir()
    check_output(tmp_path / "empty", overwrite=True)


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    real = _converted(tmp_path / "real")
    (tmp_path / "link").symlink_to(real)
    with staged_folder(tmp_path / "link", overwrite=True) as staged:
        (staged / "new").write_text("x")
    assert (tmp_path / "link").is_symlink()
    assert [path.name for path in real.iterdir()] == ["new"]


def test_a_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="is not a folder"), staged_folder(tmp_path / "file" / "out", overwrite=False):
        pytest.fail("the block ran")


def test_a_parent_that_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    # permission bits do not stop a superuser, which is what tests often run as
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(OutputError, match="Permission denied"), staged_folder(tmp_path / "out", overwrite=False):
        pytest.fail("the block ran")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_an_output_error(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match="No space left") as caught,
        staged_folder(tmp_path / "out", overwrite=False),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert "disk space" in caught.value.remedy
    assert not list(tmp_path.iterdir())


def test_a_full_disk_that_a_library_tells_of_in_its_own_words(tmp_path: Path) -> None:
    """As tokenizers does, with an exception of no kind."""
    with pytest.raises(OutputError, match="No space left") as caught, staged_folder(tmp_path / "out", overwrite=False):
        raise Exception("No space left on device (os error 28)")
    assert "disk space" in caught.value.remedy
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_only_when_it_is_asked_to_keep_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def written() -> None:
        with staged_folder(out, overwrite=True) as staged:
            (staged / "file").write_text("x")
            monkeypatch.setattr(os, "fsync", full)

    out = _converted(tmp_path / "out")
    with pytest.raises(OutputError, match="No space left"):
        written()
    assert (out / "weights").read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("made_again", [True, False])
def test_a_folder_that_vanished_is_an_output_error(tmp_path: Path, made_again: bool) -> None:
    """Also when something has made it again, as libraries that save into a folder do."""
    place = tmp_path / "place"

    def pulled_out() -> None:
        with staged_folder(place / "out", overwrite=False) as staged:
            (staged / "weights").write_text("x")
            shutil.rmtree(place)
            if made_again:
                staged.mkdir(parents=True)
                (staged / "config").write_text("x")

    with pytest.raises(OutputError, match="gone"):
        pulled_out()
    assert not (place / "out").exists()


def test_what_the_block_moved_aside_is_not_gone(tmp_path: Path) -> None:
    """An export that answers wrongly is kept under another name, and its own error is what counts."""

    def rejected() -> None:
        with staged_folder(tmp_path / "out", overwrite=False) as staged:
            staged.rename(tmp_path / "out.rejected")
            raise VerificationError("x", "y")

    with pytest.raises(VerificationError):
        rejected()
    assert [path.name for path in tmp_path.iterdir()] == ["out.rejected"]


def test_messages_name_the_output_and_not_the_folder_that_is_gone_by_then(tmp_path: Path) -> None:
    with pytest.raises(OutputError) as caught, staged_folder(tmp_path / "out", overwrite=False) as staged:
        raise OutputError(f"cannot write {staged}/model.gguf", "x")
    assert caught.value.message == f"cannot write {tmp_path}/out/model.gguf"


def test_two_runs_do_not_write_one_folder_at_once(tmp_path: Path) -> None:
    with staged_folder(tmp_path / "out", overwrite=False) as staged:
        with pytest.raises(OutputError, match="another run"), staged_folder(tmp_path / "out", overwrite=False):
            pytest.fail("the block ran")
        with staged_folder(tmp_path / "other", overwrite=False):
            pass
        (staged / "file").write_text("x")
    assert (tmp_path / "out" / "file").read_text() == "x"


def test_a_lock_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "file"))
    with pytest.raises(OutputError, match="lock") as caught, staged_folder(tmp_path / "out", overwrite=False):
        pytest.fail("the block ran")
    assert "TMPDIR" in caught.value.remedy


def test_other_file_errors_of_the_block_pass_through(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), staged_folder(tmp_path / "out", overwrite=False):
        (tmp_path / "absent").read_text()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead = tmp_path / f".out.partial-{gone.pid}-0123abcd"
    alive = tmp_path / f".out.partial-{os.getppid()}-0123abcd"
    for folder in (dead, alive):
        folder.mkdir()
    with staged_folder(tmp_path / "out", overwrite=False):
        pass
    assert not dead.exists()
    assert alive.exists()


def test_what_a_killed_run_had_moved_aside_goes_once_something_took_its_place(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    aside = _converted(tmp_path / f".out.replaced-{gone.pid}-0123abcd")
    with staged_folder(tmp_path / "out", overwrite=False) as staged:
        (staged / "conversion.json").write_text("{}")
    assert (aside / "weights").read_text() == "old"  # there was nothing else when this run began
    with staged_folder(tmp_path / "out", overwrite=True):
        pass
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
