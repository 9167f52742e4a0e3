"""Serves the studio to browsers on this machine that know its token."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmsuite.errors import UserError
from llmsuite.observe.report import page as report_page
from llmsuite.observe.runs import read_run
from llmsuite.observe.watch import answer_content
from llmsuite.plugins.manager import Registry
from llmsuite.studio.jobs import Jobs
from llmsuite.studio.recipes import Filled, Recipes
from llmsuite.web.document import Document, make_document
from llmsuite.web.local import LocalHandler, LocalServer

_HERE = Path(__file__).parent
_MOST_BYTES = 1_000_000
Query = dict[str, str]


@functools.cache
def studio_page() -> Document:
    """The page; it reads its token off its own address."""
    return make_document(_HERE / "studio.html", [_HERE / "studio.css"], [_HERE / "studio.js"])


class Studio(LocalServer):
    """The server, and what it has started; call its `serve_forever`, then its `close`."""

    def __init__(self, registry: Registry, root: Path, port: int, token: str | None = None):
        """`port` and `token` as of `LocalServer`. Raises UserError when the port is taken."""
        super().__init__(port, Handler, token)
        self.recipes, self.jobs = Recipes(registry), Jobs(root)

    def close(self) -> list[str]:
        """End the servers of models; returns the runs that go on."""
        self.server_close()
        return self.jobs.close()


class Handler(LocalHandler):
    """Asks for the token with everything: as a parameter of pages, in a header of what a page does.

    Other pages know neither, and cannot send that header without being asked first, which is not answered. So nobody
    but who has read the address in the terminal starts anything, other users of the machine included.
    """

    server: Studio

    def do_GET(self) -> None:
        place, query = self.address()
        if not self.may(query.get("token", "")):
            return
        if place == "/":
            self._page(studio_page())
        elif place in ("/watch/", "/watch/content"):
            self._do(lambda: self._watch(place, query))
        elif place == "/recipes":
            self._json(lambda: self.server.recipes.known())
        elif place == "/runs":
            self._json(lambda: self.server.jobs.known())
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        if not self.may(self.headers.get("X-Token", "")):
            return
        acts: dict[str, Callable[[Any], Any]] = {
            "/keys": lambda told: self.server.recipes.keys(Filled.of(told)),
            "/check": lambda told: self.server.recipes.check(Filled.of(told)),
            "/plan": lambda told: {"text": self.server.recipes.plan(Filled.of(told))},
            "/start": self._start,
            "/stop": lambda told: self.server.jobs.stop(_run(told)),
            "/talk": lambda told: self.server.jobs.talk(_run(told)),
        }
        act = acts.get(self.path)
        if act is None:
            self.refuse(404)
            return
        told = self._body()
        if told is not None:
            self._json(lambda: act(told["body"]))

    def _start(self, told: Any) -> dict[str, str]:
        filled = Filled.of(told)
        plan = self.server.recipes.plan_of(filled)
        plan.check_files()
        return {"run": self.server.jobs.start(filled, plan.output_dir)}

    def _watch(self, place: str, query: Query) -> None:
        directory = self.server.jobs.directory(query.get("run", ""))
        if place == "/watch/content":
            answer_content(self, [directory])
        else:
            self._page(report_page([read_run(directory)], live=True))

    def _body(self) -> dict[str, Any] | None:
        """The JSON of a request, as "body"; None if it was refused."""
        length = self.body_length()
        if length is None or length > _MOST_BYTES:
            self.refuse(413)
            return None
        try:
            return {"body": json.loads(self.rfile.read(length))}
        except (ValueError, RecursionError):
            self.send_error(400)
            return None

    def _page(self, document: Document) -> None:
        self.answer(document.html, Content_Security_Policy=document.policy)

    def _json(self, ask: Callable[[], Any]) -> None:
        self._do(lambda: self.answer(json.dumps(ask()), "application/json"))

    def _do(self, act: Callable[[], None]) -> None:
        try:
            act()
        except UserError as error:
            self.answer(json.dumps({"error": str(error)}), "application/json", 400)


def _run(told: Any) -> str:
    if not isinstance(told, dict) or not isinstance(told.get("run"), str):
        raise UserError("the page has named no run; load it again")
    name: str = told["run"]
    return name
