"""An output folder that appears whole or not at all."""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from mla_convert.errors import MLAConvertError, OutputError
from mla_convert.record import RECORD_NAME

_LONGEST_NAME = 200
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FAILING = frozenset({errno.EROFS, errno.EIO, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ENOTCONN})
# How libraries written in Rust end what they say of a failure.
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def check_output(out: Path, *, overwrite: bool) -> None:
    """Check that :func:`staged_folder` may write ``out``, before any work is done.

    Raises:
        OutputError: ``out`` exists and may not be replaced: without ``overwrite`` anything that exists; with it
            anything but an empty folder or one that holds a ``conversion.json``. Or it cannot be created where it is
            asked for.
    """
    if not os.path.lexists(out):
        _check_place(Path(os.path.realpath(out)))
        return
    if not out.is_dir():
        raise OutputError(f"{out} exists and is not a folder", "choose another output folder")
    if not overwrite:
        raise OutputError(f"the output folder {out} exists", "choose another folder, or pass --overwrite to replace it")
    if not (out / RECORD_NAME).is_file() and any(out.iterdir()):
        raise OutputError(
            f"{out} holds files but no {RECORD_NAME}, so it was not written by mla-convert and is not replaced",
            "choose another output folder, or remove this one by hand",
        )
    _check_writable(Path(os.path.realpath(out)).parent)


@contextmanager
def sole_run(out: Path, kind: str) -> Iterator[None]:
    """Within it, no other process on this machine is in one of the same ``kind`` for ``out``.

    The lock lies among the system's temporary files, so that nothing is left beside the output.

    Raises:
        OutputError: one is.
    """
    name = hashlib.sha256(os.path.realpath(out).encode()).hexdigest()[:32]
    user = os.getuid() if hasattr(os, "getuid") else 0
    lock = FileLock(Path(tempfile.gettempdir()) / f"mla-convert-{user}-{name}.{kind}.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise OutputError(
            f"another run is writing {out}", "wait until it has finished, or choose another output folder"
        ) from error
    except OSError as error:
        raise OutputError(
            f"cannot make the lock {lock.lock_file}: {error.strerror or error}",
            "make room there, or set TMPDIR to a folder you may write to",
        ) from error
    try:
        yield
    finally:
        lock.release()


def _check_place(target: Path) -> None:
    """Check that a folder can be made at ``target``, whose name leaves room for that of the staged one."""
    ancestor = next(folder for folder in target.parents if os.path.lexists(folder))
    if not ancestor.is_dir():
        raise OutputError(f"{ancestor} is not a folder, so {target} cannot be made in it", "choose another folder")
    _check_writable(ancestor)
    if len(os.fsencode(target.name)) > _LONGEST_NAME:
        raise OutputError(f"the name of {target} is too long", f"choose one of at most {_LONGEST_NAME} bytes")


def _check_writable(folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{folder} is not writable", "choose a folder you may write to")


def _sweep(target: Path) -> None:
    """Remove what earlier runs for ``target`` left when they were killed: staged folders whose process is gone, and
    what they had moved aside, unless nothing has taken its place."""
    kinds = ("partial", "replaced") if target.exists() else ("partial",)
    found = ((kind, left) for kind in kinds for left in target.parent.glob(f".{glob.escape(target.name)}.{kind}-*"))
    for kind, left in found:
        process = left.name.rpartition(f".{kind}-")[2].partition("-")[0]
        if process.isdigit() and not Path(f"/proc/{process}").exists() and Path("/proc/self").exists():
            shutil.rmtree(left, ignore_errors=True)


@contextmanager
def staged_folder(out: Path, overwrite: bool) -> Iterator[Path]:
    """Yield an empty folder beside ``out`` that becomes ``out`` when the block succeeds and vanishes when it fails.

    Missing parent folders are created, and removed again on failure. An ``out`` that is replaced stays untouched until
    the new folder is whole and on the disk; it is moved aside first and moved back when the new one cannot take its
    place.

    Raises:
        OutputError: ``out`` may not be written (see :func:`check_output`), another run is writing it, its parent is not
            writable, or the block failed because the disk is full, failing, read-only or gone.
    """
    check_output(out, overwrite=overwrite)
    target = Path(os.path.realpath(out))
    with sole_run(out, "write"):
        _sweep(target)
        staged = target.with_name(f".{target.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")
        missing_parents = [folder for folder in (target.parent, *target.parent.parents) if not folder.exists()]
        try:
            staged.mkdir(parents=True)
            held = os.open(staged, os.O_RDONLY)  # as long as it is, no other folder gets its inode
        except OSError as error:
            _discard(staged, missing_parents)
            raise OutputError(
                f"cannot create the output folder {out}: {error.strerror or error}", "choose a folder you may write to"
            ) from error
        made = os.fstat(held)
        try:
            yield staged
            _sync(staged, made)
            check_output(out, overwrite=overwrite)
            _swap(staged, target)
        except Exception as error:
            failure = _failure(error, staged, made, out)
            _discard(staged, missing_parents)
            if failure is None:
                raise
            raise failure from error
        except BaseException:
            _discard(staged, missing_parents)
            raise
        finally:
            os.close(held)


def _failure(error: Exception, staged: Path, made: os.stat_result, out: Path) -> OutputError | None:
    """Return what to raise for a failure that is the disk's, or None if it is not."""
    if isinstance(error, OutputError):
        return OutputError(error.message.replace(str(staged), str(out)), error.remedy)
    number = error.errno if isinstance(error, OSError) else None
    if not isinstance(error, (OSError, MLAConvertError)) and (said := _OS_ERROR.search(str(error))):
        number = int(said[1])
    remedy = "see that its disk is there and can be written"
    if _is_gone(staged, made):
        why = "the folder it was written to is gone"
    elif number in _FULL or number in _FAILING:
        why = os.strerror(number)
        remedy = "free some disk space" if number in _FULL else remedy
    else:
        return None
    return OutputError(
        f"cannot write the output folder {out}: {why}",
        f"{remedy}, or choose another output folder; the unfinished one was removed",
    )


def _is(path: Path, made: os.stat_result) -> bool:
    """Whether the folder is the one that was made, and not one that a library made again in its place."""
    try:
        return os.path.samestat(path.stat(), made)
    except OSError:
        return False


def _is_gone(staged: Path, made: os.stat_result) -> bool:
    """Whether the staged folder is neither there nor beside where it was, as one is that was not wanted."""
    try:
        return not any(_is(path, made) for path in (staged, *staged.parent.iterdir()))
    except OSError:
        return True


def _sync(staged: Path, made: os.stat_result) -> None:
    """Wait until the folder's files are on the disk: a full or failing one may say so only now.

    Raises:
        OSError: they cannot be, or the folder is not the one that was made.
    """
    if not _is(staged, made):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(staged))
    for path in staged.rglob("*"):
        if path.is_file():
            _sync_path(path)
    _sync_folder(staged)


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # file systems that keep no order of their own for folders refuse
        _sync_path(folder)


def _swap(staged: Path, target: Path) -> None:
    """Rename ``staged`` to ``target``; a ``target`` that exists is moved aside first and deleted last.

    Raises:
        OutputError: a rename failed; ``target`` is what it was.
    """
    aside = staged.with_name(staged.name.replace(".partial-", ".replaced-"))
    moved = False
    try:
        if target.exists():
            target.rename(aside)
            moved = True
        staged.rename(target)
    except OSError as error:
        if moved:
            aside.rename(target)
        raise OutputError(
            f"cannot move the finished folder to {target}: {error.strerror or error}",
            "choose another output folder; a mount point, for example, cannot be replaced",
        ) from error
    _sync_folder(target.parent)
    if moved:
        shutil.rmtree(aside, ignore_errors=True)


def _discard(staged: Path, missing_parents: list[Path]) -> None:
    """Remove the staged folder and those of its parents that did not exist before, as far as they are empty."""
    shutil.rmtree(staged, ignore_errors=True)
    for folder in missing_parents:
        with suppress(OSError):
            folder.rmdir()
