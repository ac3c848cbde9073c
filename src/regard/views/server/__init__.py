"""The explorer: a page on this machine that looks at any A, at any length.

    regard.views.server.serve("text.trace")

| file | what it does |
|---|---|
| serving | starting and stopping |
| app | HTTP: pages, tiles, numbers |
| safety | which requests are ours |
| work | one queue for all clients |
| sources | traces, recordings, uploads |
| maps | which maps are open, small pictures of all heads |
| answers | what is asked of one head |
| doing | what heads do, where they are long |
| images | the pictures that tokens are patches of |
| lessons | the lessons' pages, and what their pictures show |

Needs starlette and uvicorn: pip install "regard[explore]".
"""

from .serving import Server, serve

__all__ = ["Server", "serve"]
