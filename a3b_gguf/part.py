"""The `NAME.part` that becomes NAME: locked, resumable, trusted only as far as the disk is known to have it.

While it is written, its first bytes are a record instead of the header's: MAGIC, key, trusted length, crc32. So an unfinished file is
never taken for a model. The record is written only after the bytes that it vouches for were synced; after `kill -9` or a power cut
whatever stands behind the trusted length is cut off and written again. `finish` puts the header in its place: the final bytes do not
depend on how often the work was interrupted.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from a3b_gguf.errors import MachineLacks, UsageError
from a3b_gguf.units import human_bytes

MAGIC = b"A3BPART1"
RECORD = struct.Struct("<8s32sQ")  # magic, key, trusted length; a crc32 of them follows
RECORD_BYTES = RECORD.size + 4
SYNC_SECONDS = 5.0  # how often whole tensors are synced: what a kill costs, besides one tensor. Oftener, the disk is slower
WRITE_BYTES = 256 << 10  # one write; of 1 MiB and more they took 2 to 3 times as long (ext4, Linux 6.18), of 64 KiB half as long again
AHEAD_BYTES = 4 << 30  # how much may be written while a sync goes on
DISK_IS_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
CANNOT_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.ENOENT, errno.ENAMETOOLONG)


class Part:
    """Owns `path`.part. key: 32 bytes that say what is written; what an earlier run left is kept only under the same key.

    trusted: bytes from the start that are on disk for certain. replaced: whether a file of another key, or no record, was thrown away.
    """

    def __init__(self, path: Path, key: bytes, ends: Sequence[int]) -> None:
        """ends: where the file may be continued. Raises MachineLacks when another run writes the same file, UsageError for a bad place."""
        self.path, self.key = written(path), key
        self.name = self.path.with_name(self.path.name + ".part")
        self._descriptor = _locked(self.name)
        found = _trusted_length(os.pread(self._descriptor, RECORD_BYTES, 0), key)
        size = os.fstat(self._descriptor).st_size
        self.trusted = found if found in ends and found is not None and found <= size else 0
        self.replaced = size > 0 and found is None
        self.whole = self.trusted
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="sync")
        self._syncing: Future[None] | None = None
        self._synced_at = time.monotonic()
        os.ftruncate(self._descriptor, self.trusted)

    def begin(self, start: bytes) -> int:
        """How many bytes are there already; for a new part, writes the record and the rest of the header `start`."""
        if not self.trusted:
            self.write(0, self._record(0) + start[RECORD_BYTES:])
        return self.trusted

    def write(self, offset: int, data: bytes | memoryview) -> int:
        """Writes `data` at `offset` and returns where it ends."""
        view = memoryview(data).cast("B")
        while view:
            count = os.pwrite(self._descriptor, view[:WRITE_BYTES], offset)
            view, offset = view[count:], offset + count
        return offset

    def mark(self, whole: int) -> None:
        """The first `whole` bytes are a good place to continue. Syncs them in the background when it is time."""
        self.whole = whole
        if self._syncing is not None and not self._syncing.done() and whole - self.trusted < AHEAD_BYTES:
            return
        self._wait()
        if time.monotonic() - self._synced_at >= SYNC_SECONDS:
            self._syncing = self._pool.submit(self._sync, whole)

    def finish(self, start: bytes, n_bytes: int) -> None:
        """Everything is written: puts the true first bytes over the record and syncs. The name is still that of a part."""
        self._wait()
        os.fsync(self._descriptor)  # so that the header, which makes it a model, never comes before its tensors
        self.write(0, start[:RECORD_BYTES])
        os.ftruncate(self._descriptor, n_bytes)
        os.fsync(self._descriptor)

    def rename(self) -> None:
        """`path` is the new file from now on, also after a power cut."""
        os.replace(self.name, self.path)
        sync_folder(self.path.parent)

    def sync(self) -> None:
        """Trusts everything that was marked. Raises OSError; then `trusted` is what was synced before."""
        self._wait()
        if self.whole > self.trusted:
            self._sync(self.whole)

    def remove(self) -> None:
        self.name.unlink(missing_ok=True)

    def close(self) -> None:
        """Ends the background thread and gives up the lock."""
        self._pool.shutdown()
        os.close(self._descriptor)

    def _sync(self, whole: int) -> None:
        os.fsync(self._descriptor)
        os.pwrite(self._descriptor, self._record(whole), 0)
        self.trusted = whole
        self._synced_at = time.monotonic()

    def _wait(self) -> None:
        if self._syncing is not None:
            self._syncing.result()
            self._syncing = None

    def _record(self, trusted: int) -> bytes:
        data = RECORD.pack(MAGIC, self.key, trusted)
        return data + struct.pack("<I", zlib.crc32(data))


def _trusted_length(data: bytes, key: bytes) -> int | None:
    """What the record of a part vouches for, or None when it is none, damaged, or of something else."""
    if len(data) < RECORD_BYTES or struct.pack("<I", zlib.crc32(data[: RECORD.size])) != data[RECORD.size :]:
        return None
    magic, found, trusted = RECORD.unpack_from(data)
    return int(trusted) if (magic, found) == (MAGIC, key) else None


def _locked(name: Path) -> int:
    """A descriptor of the file, made if need be, that no other process has locked."""
    while True:
        try:
            descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError as error:
            raise UsageError(f"{name.parent}: {error.strerror}", "the folder of the output must exist") from error
        except OSError as error:
            raise disk_error(name, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise MachineLacks(f"{name} is being written by another run", "wait for it, or write elsewhere with -o") from error
        except OSError as error:
            os.close(descriptor)
            raise disk_error(name, error) from error
        if _is(name, descriptor):
            return descriptor
        os.close(descriptor)  # the run that had it renamed it in between


def _is(name: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(name), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def write_file(path: Path, data: bytes | memoryview, what: str = "the output") -> None:
    """A small file, whole or not at all. Raises as part_file."""
    with part_file(path, len(data), what) as out:
        out.write(data)


@contextmanager
def part_file(path: Path, n_bytes: int, what: str = "the output") -> Iterator[BinaryIO]:
    """For small files: opens `path` + ".part" for writing; on success it is synced and renamed to `path`, on failure removed.

    A file that it takes the place of hands on its permissions. Raises UsageError for a place that cannot be written, MachineLacks when
    the disk is full.
    """
    path = written(path, what)
    part = path.with_name(path.name + ".part")
    check_space(path, n_bytes)
    try:
        with part.open("wb") as out:
            yield out
            out.flush()
            if path.exists():
                os.fchmod(out.fileno(), stat.S_IMODE(path.stat().st_mode))
            os.fsync(out.fileno())
        os.replace(part, path)
        sync_folder(path.parent)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise disk_error(path, error) from error
        raise


def written(path: Path, what: str = "the output") -> Path:
    """The file that a new one takes the place of: `path`, or what it links to. Raises UsageError when that is no plain file.

    A rename would put a file where a folder's name, a device or a pipe stands: for root also where /dev/null does.
    """
    if str(path) == "-":
        raise UsageError(f"{what} - is a pipe, not a file", "name a file: it is not written in order")
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "choose a place that can be written") from error
    if not stat.S_ISREG(mode):
        kind = "folder" if stat.S_ISDIR(mode) else "device or a pipe"
        raise UsageError(f"{what} {path} is a {kind}, not a file", "name a file: it is written whole beside that name, then renamed")
    return path.resolve() if path.is_symlink() else path


def check_space(path: Path, n_bytes: int) -> None:
    """Raises MachineLacks when the disk of `path` cannot take `n_bytes` more, UsageError when its folder is not there."""
    folder = written(path).parent
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}", "the folder of the output must exist") from error
    if n_bytes > free:
        needs = f"{path} needs {human_bytes(n_bytes)}, its disk has {human_bytes(free)} free"
        raise MachineLacks(needs, "free some space or write elsewhere")


def disk_error(path: Path, error: OSError, kept: str = "nothing was left behind") -> MachineLacks | UsageError:
    """What an OSError of writing means to the user. kept: what is left of the work."""
    if error.errno in DISK_IS_FULL:
        return MachineLacks(f"{path}: {error.strerror} while writing; {kept}", "free some space or write elsewhere")
    if error.errno in CANNOT_WRITE:
        return UsageError(f"{path}: {error.strerror}", "choose a place that can be written")
    return MachineLacks(f"{path}: {error.strerror or error}; {kept}", "look at the disk, then try again")


def sync_folder(folder: Path) -> None:
    """Makes a rename durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
