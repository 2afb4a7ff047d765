"""Real file systems for tests."""

import ctypes
import os
import subprocess
from contextlib import contextmanager

import pytest


@contextmanager
def mounted(point, *arguments):
    """``mount ARGUMENTS POINT`` until the end of the block. Skips the test where that is not
    allowed."""
    point.mkdir()
    done = subprocess.run(
        ["mount", *arguments, str(point)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True)


@contextmanager
def silent(point):
    """A file system over ``point`` that answers nothing: FUSE without a process. All that was asked
    fails at the end of the block. Skips the test where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        connection = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"no FUSE here: {error}")
    options = f"fd={connection},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()}"
    if libc.mount(b"silent", os.fsencode(point), b"fuse", 0, options.encode()):
        os.close(connection)
        pytest.skip(f"cannot mount here: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        os.close(connection)
        assert not libc.umount2(os.fsencode(point), 2), "MNT_DETACH"
