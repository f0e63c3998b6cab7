"""Wake a main thread waiting in gloo for dead ranks.

gloo's ``abort`` and ``shutdown`` wake nobody (torch 2.13). A wait ends with an error as soon as the
underlying connection is shut down. Any thread of the process may shut down connections.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress


def cut_connections(keep_port: int) -> int:
    """Shut down the TCP connections of this process, except connections of a given port. Return the
    number of connections shut down.

    Args:
        keep_port: Port of the job's store. The store outlives the ranks' connections.
    """
    count = 0
    for connection in _connections():
        with connection, suppress(OSError):  # not connected
            ports = connection.getpeername()[1], connection.getsockname()[1]
            if keep_port not in ports:
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _connections() -> Iterator[socket.socket]:
    """Yield the TCP sockets of this process, duplicated."""
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):  # closed in the meantime
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
            is_tcp = connection.family in {socket.AF_INET, socket.AF_INET6}
            if is_tcp and connection.type == socket.SOCK_STREAM:
                yield connection
            else:
                connection.close()
