"""Starting and stopping the explorer. It listens on the loopback address only."""

from __future__ import annotations

import logging
import os
import socket
import threading
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...matrix import AttentionMatrix
from ...subjects import DIGITS, EMBEDDED, TEXT
from ...trace import Trace

if TYPE_CHECKING:
    from .app import Explorer

log = logging.getLogger("regard")

ADDRESS = "127.0.0.1"
#: the image to begin with
DIGIT = "3"


class Server:
    """An explorer that runs in a thread of its own, from `with` or until `close`.

    with Server(trace) as server: print(server.url)
    """

    def __init__(
        self, *given: Trace | AttentionMatrix | str | os.PathLike, port: int = 0, text: str | None = None,
        device: str | None = None,
    ):  # fmt: skip
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
            raise ValueError(f"port: expected a number from 0 to 65535, found {port!r}")
        try:
            import uvicorn

            from .app import Explorer
            from .sources import Sources
        except ImportError as error:
            raise ImportError(f"the explorer needs {error.name}; pip install starlette uvicorn") from None
        where = None if device is None else _usable(device)
        self.socket = _bound(port)
        self.port = self.socket.getsockname()[1]
        self.explorer: Explorer = Explorer(Sources(device=where))
        self.explorer.port = self.port
        try:
            for each in given:
                self.add(each)
        except BaseException:
            self.explorer.close()
            self.socket.close()
            raise
        if text is not None:
            self.record(text, EMBEDDED)
            self.record(DIGIT, DIGITS)
        config = uvicorn.Config(
            self.explorer.app,
            log_level="warning",
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=75,
        )
        self._server: Any = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self.socket],), name="regard server", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.port}/"

    def add(
        self, given: Trace | AttentionMatrix | str | os.PathLike, name: str | None = None, image: Tensor | None = None
    ) -> str:  # fmt: skip
        """Offer a trace, a file or an A [batch, heads, q_len, k_len]; its number.

        `image` is the picture that the tokens on a grid are patches of: [rows, columns] or [rows, columns, 3], bytes or
        numbers from 0 to 1.
        """
        from .images import picture
        from .sources import opened

        shown = None if image is None else picture(image.cpu())
        if isinstance(given, (str, os.PathLike)):
            path = Path(given)
            if not path.is_file():
                raise ValueError(f"trace: no file {str(path)!r}")
            held = opened(path, path.name)
            added = self.explorer.sources.add(
                name or path.name, held.trace, "file", held.image if shown is None else shown
            )
        elif isinstance(given, (Trace, AttentionMatrix)):
            added = self.explorer.sources.add(name or "A", given, image=shown)
        else:
            raise TypeError(f"trace: expected a Trace, a path or an A, found {type(given).__name__}")
        self.explorer.maps.begin(added.id)
        return added.id

    def record(self, text: str, model: str) -> str:
        """Have a model read a text (or look at the image of a digit), and offer what it looked at; its number."""
        from .sources import read

        source = self.explorer.sources.new(f"{' '.join(text.split())[:40]} · {model}", model)
        self.explorer._make(source, lambda: read(model, text))
        return source.id

    def wait(self) -> None:
        """Until it is stopped."""
        self._thread.join()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self.socket.close()
        self.explorer.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def serve(
    trace: Trace | AttentionMatrix | str | os.PathLike | None = None, port: int = 0, open_browser: bool = True,
    device: str | None = None,
) -> None:  # fmt: skip
    """Serve the explorer on this machine until it is interrupted. Without a trace it begins with a text and an image.

    `device` says where A is computed ("cuda"); where its tensors are unless it is given.
    """
    given = () if trace is None else (trace,)
    server = Server(*given, port=port, text=TEXT if trace is None else None, device=device)
    print(f"Regard explorer: {server.url}  (Ctrl-C ends it)", flush=True)
    try:
        if open_browser:
            webbrowser.open(server.url)
        server.wait()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()


def _usable(device: str) -> torch.device:
    """A device that there is."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise ValueError(f"device: {device!r} cannot be used ({reason})") from None
    return found


def _bound(port: int) -> socket.socket:
    """A socket on the loopback address, so that the port is known before anything is served."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((ADDRESS, port))
    except OSError as error:
        made.close()
        raise ValueError(f"port: {port} cannot be used ({error.strerror or error})") from None
    made.listen(128)
    return made
