"""Write a file in a thread, so that ranks in a collective read do not wait for a disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

from megatron_lightning.checkpoint.format.files import write_file

Chunk = bytes | memoryview
_AHEAD = 2  # chunks in memory


class FileWriter:
    """Writes chunks to a new file. An error is raised at the close of the file, and never before. A
    rank stopping in the middle would leave the other ranks waiting.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._chunks: Queue[Chunk | None] = Queue(_AHEAD)
        self._has_ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"write-{path.name}", daemon=True)
        self._thread.start()

    def put(self, chunk: Chunk) -> None:
        """Append a chunk. Wait while too many chunks are in memory."""
        self._chunks.put(chunk)

    def end(self) -> None:
        """Wait until all chunks are on the disk."""
        if self._thread.is_alive():
            self._chunks.put(None)
        self._thread.join()

    def check(self) -> None:
        """Raise the error of writing, if there was an error."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            write_file(self._path, self._taken())
        except BaseException as error:
            self._error = error
            for _ in self._taken():
                pass

    def _taken(self) -> Iterator[Chunk]:
        while not self._has_ended:
            chunk = self._chunks.get()
            if chunk is None:
                self._has_ended = True
            else:
                yield chunk
