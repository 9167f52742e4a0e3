"""`llmsuite plugins new NAME`: writes a small complete plugin package from the templates in plugin_templates."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from llmsuite.base.errors import UserError
from llmsuite.base.files import published_directory
from llmsuite.base.safe_files import exists
from llmsuite.contract.registry import Registry

Kind = Literal["stage", "reward", "family"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_TEMPLATES = Path(__file__).parent / "plugin_templates"
_MAX_LENGTH = 40
_DESCRIPTIONS: Mapping[Kind, str] = {
    "stage": "A stage for llmsuite: plain next-token training on rows with a text.",
    "reward": "A reward for online RL with llmsuite: 1 for a short completion.",
    "family": "A model family for llmsuite.",
}
_CHECKS: Mapping[Kind, str] = {
    "stage": "documented keys, a loss that falls, an exact resume, and the same numbers on two ranks",
    "reward": "documented keys, and one finite number for each completion, the same each time",
    "family": "the same network in training, generation, export, rollouts, and on two ranks",
}
_USAGE: Mapping[Kind, str] = {
    "stage": 'In a recipe: `"stage": "{name}"`, with the keys of the section `{name}`.',
    "reward": 'In a recipe: `"reward": {{"functions": {{"{name}": 1.0}}, "{name}": {{"max_words": 50}}}}`.',
    "family": 'In a recipe: `"model": {{"family": "{name}", "config": {{…}}}}`, or weights whose config.json has its '
    "`model_type`.",
}
_REGISTERED: Mapping[Kind, str] = {"stage": "stages", "reward": "rewards", "family": "models"}


def write_plugin(name: str, kind: Kind, directory: Path, registry: Registry) -> list[Path]:
    """Write the package of a plugin that adds one stage, reward or model family: all of it, or nothing where writing
    fails or is interrupted.

    Args:
        name: name of what it adds, in recipes.
        kind: what it adds.
        directory: the package's directory, which must not exist.
        registry: what is registered already.

    Returns:
        The files, relative to the directory.

    Raises:
        UserError: the name cannot be used, or the directory exists or cannot be written.
    """
    _check_name(name, kind, registry)
    if exists(directory):
        raise UserError(f"{directory} exists; name another directory with -o")
    module = f"llmsuite_{name}"
    values = {
        "name": name,
        "kind": kind,
        "module": module,
        "distribution": f"llmsuite-{name.replace('_', '-')}",
        "class_name": "".join(word.capitalize() for word in name.split("_")),
        "description": _DESCRIPTIONS[kind],
        "checks": _CHECKS[kind],
        "usage": _USAGE[kind].format(name=name),
    }
    files = {"pyproject.toml": _rendered("pyproject.toml", values), "README.md": _rendered("README.md", values)}
    for template in sorted((_TEMPLATES / kind).glob("*.jinja")):
        file = template.stem
        place = f"tests/{file}" if file.startswith("test_") else f"{module}/{file}"
        files[place] = _rendered(f"{kind}/{file}", values)
    with published_directory(directory) as unfinished:
        for place, text in files.items():
            path = unfinished / place
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return [Path(place) for place in files]


def _check_name(name: str, kind: Kind, registry: Registry) -> None:
    is_name = re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) and len(name) <= _MAX_LENGTH
    if not is_name or keyword.iskeyword(name):
        raise UserError(
            f"plugins new: {name!r} is no name for a plugin; use lowercase letters, digits and single underscores, "
            f"beginning with a letter, at most {_MAX_LENGTH} characters, such as my_{kind}"
        )
    if name in getattr(registry, _REGISTERED[kind]):
        raise UserError(f"plugins new: there is a {kind} {name!r} already; choose another name")


def _rendered(template: str, values: Mapping[str, str]) -> str:
    import jinja2

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    text = (_TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    return environment.from_string(text).render(values)
