"""Serves the studio to browsers on this machine that know its token."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.web.document import Document, make_document
from llmsuite.base.web.local import LocalHandler, LocalServer
from llmsuite.contract.registry import Registry
from llmsuite.observe.report import page as report_page
from llmsuite.observe.runs import read_run
from llmsuite.observe.watch import answer_content
from llmsuite.plugins.studio.commands import NewRecipe, explain_row
from llmsuite.plugins.studio.jobs import Jobs
from llmsuite.plugins.studio.recipes import FilledRecipe, Recipes

_HERE = Path(__file__).parent
_MAX_BODY_BYTES = 1_000_000
Query = dict[str, str]


@functools.cache
def studio_page() -> Document:
    """The HTML page; it reads the token from its own address."""
    return make_document(_HERE / "studio.html", [_HERE / "studio.css"], [_HERE / "studio.js"])


class Studio(LocalServer):
    """The server of the page, with the processes that it has started; call `serve_forever`, then `close`."""

    def __init__(self, registry: Registry, root: Path, port: int, token: str | None = None):
        """
        Args:
            registry: of stages, families and devices.
            root: directory to search for runs.
            port: 0 for any free port.
            token: that requests have to send; None for a new one.

        Raises:
            UserError: the port is taken.
        """
        super().__init__(port, Handler, token)
        self.recipes = Recipes(registry)
        self.jobs = Jobs(root)

    def close(self) -> list[str]:
        """End the servers of models; returns the runs that continue."""
        self.server_close()
        return self.jobs.close()


class Handler(LocalHandler):
    """Requires the token in every request: as a query parameter of pages, in a header of actions.

    Pages of other origins do not have the token, and cannot send that header without a CORS preflight, which is not
    answered. So only a user who has read the address in the terminal can start anything, also among the users of this
    machine.
    """

    server: Studio

    def do_GET(self) -> None:
        place, query = self.address()
        if not self.is_authorized(query.get("token", "")):
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
        if not self.is_authorized(self.headers.get("X-Token", "")):
            return
        acts: dict[str, Callable[[Any], Any]] = {
            "/keys": lambda body: self.server.recipes.keys(FilledRecipe.of(body)),
            "/check": lambda body: self.server.recipes.check(FilledRecipe.of(body)),
            "/new": lambda body: NewRecipe.of(body).make(),
            "/explain": lambda body: {"text": explain_row(FilledRecipe.of(body), body.get("row"))},
            "/plan": lambda body: {"text": self.server.recipes.plan(FilledRecipe.of(body))},
            "/start": self._start,
            "/stop": lambda body: self.server.jobs.stop(_run(body)),
            "/talk": lambda body: self.server.jobs.chat(_run(body)),
        }
        act = acts.get(self.path)
        if act is None:
            self.refuse(404)
            return
        received = self._body()
        if received is not None:
            self._json(lambda: act(received["body"]))

    def _start(self, body: Any) -> dict[str, str]:
        form = FilledRecipe.of(body)
        plan = self.server.recipes.plan_of(form)
        plan.check_files()
        return {"run": self.server.jobs.start(form, plan.output_dir)}

    def _watch(self, place: str, query: Query) -> None:
        directory = self.server.jobs.directory(query.get("run", ""))
        if place == "/watch/content":
            answer_content(self, [directory])
        else:
            self._page(report_page([read_run(directory)], live=True))

    def _body(self) -> dict[str, Any] | None:
        """Return the JSON of a request, as "body"; None if it was refused."""
        length = self.body_length()
        if length is None or length > _MAX_BODY_BYTES:
            self.refuse(413)
            return None
        try:
            return {"body": json.loads(self.rfile.read(length))}
        except (ValueError, RecursionError):
            self.send_error(400)
            return None

    def _page(self, document: Document) -> None:
        self.answer(document.html, Content_Security_Policy=document.policy)

    def _json(self, act: Callable[[], Any]) -> None:
        self._do(lambda: self.answer(json.dumps(act()), "application/json"))

    def _do(self, act: Callable[[], None]) -> None:
        try:
            act()
        except UserError as error:
            self.answer(json.dumps({"error": str(error)}), "application/json", 400)


def _run(body: Any) -> str:
    if not isinstance(body, dict) or not isinstance(body.get("run"), str):
        raise UserError("the page has named no run; load it again")
    name: str = body["run"]
    return name
