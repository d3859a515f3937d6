"""Locks of open files between processes."""

from __future__ import annotations

import errno

_WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


def try_lock(descriptor: int) -> bool:
    """Lock an open file until it is closed or the process ends; return False when another process has it.

    Where the file system or the platform has no locks, True: that cannot keep others out, and refusing to write there
    would be worse than not noticing one. Raises OSError where the disk fails.
    """
    try:
        import fcntl
    except ImportError:  # Windows neither removes nor replaces a file that is open
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
    return True
