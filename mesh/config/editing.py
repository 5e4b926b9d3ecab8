"""One key of a node's TOML file set or taken out, as a careful person would do it by hand.

Comments, order and spelling of everything else stay. Works on texts; `replace_file` puts one in the
place of a file. What a value means, and whether it may be, is `settings`' to say.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomlkit

from mesh.config.problems import meanings, unknown
from mesh.config.settings import Config, Settings, flatten, parsed, read_as
from mesh.errors import BadValue
from mesh.private_files import mending, write_draft


def with_value(file: Path, text: str, key: str, value: str) -> tuple[str, Settings]:
    """The text with the dotted `key` as it is written on a command line, and what comes of it.

    Raises UnknownKey, and BadValue where the value, or the rest of the file, cannot be used.
    """
    _require_setting(key)
    given = _listed(value)
    draft = _changed(file, text, key, lambda table, name: table.update({name: given}))
    settings = read_as(file, draft)
    if settings.origins[key] != str(file):  # hidden by a variable, and to be good all the same
        settings = read_as(file, draft, alone=True)
    # As it is understood, so that the file has 9000 and true and not "9000" and "true".
    plain = flatten(settings.config)[key]
    if isinstance(plain, bool | int | float | list):
        plain = int(plain) if isinstance(plain, float) and plain.is_integer() else plain
        draft = _changed(file, text, key, lambda table, name: table.update({name: plain}))
    return draft, read_as(file, draft)


def without_key(file: Path, text: str, key: str) -> tuple[str, Settings]:
    """The text without the key. Raises as `with_value`, and BadValue where it has none."""
    _require_setting(key)
    settings = read_as(file, text)
    if not _has(parsed(file, text), key):
        raise BadValue(
            f"{file} does not set {key}: its value is from {settings.origins[key]}.",
            fix="There is nothing to unset there.",
            param=key,
        )
    draft = _changed(file, text, key, lambda table, name: table.pop(name))
    return draft, read_as(file, draft)


def replace_file(file: Path, text: str, expected: str | None) -> None:
    """Put the text in the place of the file, in one step; `expected` is what was read there, None
    where there was no file. A new one is for its owner alone, another keeps its mode.

    Raises BadValue when somebody else has written it meanwhile, or it cannot be written.
    """
    target = file.resolve()  # a link stays one
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (read_text(target) if target.exists() else None) != expected:
            raise BadValue(
                f"{file} was changed by somebody else meanwhile.", fix="Try again.", param="config"
            )
        draft = write_draft(target, text.encode())  # 0600: there may be a key in it
        try:
            if expected is not None:
                draft.chmod(target.stat().st_mode & 0o7777)
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise BadValue(
            f"{file} cannot be written: {error.strerror or error}.",
            fix=mending(error, "See to its directory, or name another file with --config."),
            param="config",
        ) from error


def read_text(file: Path) -> str:
    """What the file has; nothing where there is none. Raises BadValue."""
    try:
        return file.read_bytes().decode() if file.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise BadValue(
            f"{file} cannot be read: {error}.", fix="Correct the file.", param="config"
        ) from error


def _require_setting(key: str) -> None:
    known = meanings(Config)
    if key in known:
        return
    below = [name for name in known if name.startswith(f"{key}.")]
    if below:
        raise BadValue(
            f"{key} is a section of settings.", fix=f"Name one in it, {below[0]}.", param=key
        )
    raise unknown(key, known, "The command line")


def _listed(value: str) -> Any:
    """A TOML array where it is one, else the text as it is."""
    if value.startswith("["):
        with suppress(tomllib.TOMLDecodeError):
            return tomllib.loads(f"value = {value}")["value"]
    return value


def _changed(
    file: Path, text: str, key: str, change: Callable[[MutableMapping[str, Any], str], object]
) -> str:
    """The text after a change of one key; raises BadValue where something else would be another."""
    *sections, name = key.split(".")
    wanted: dict[str, Any] = parsed(file, text)
    document = tomlkit.parse(text)
    table: Any = document
    plain: Any = wanted
    for at, section in enumerate(sections):
        if section not in table:
            table[section] = tomlkit.table(is_super_table=at < len(sections) - 1)
        table = table[section]
        if not isinstance(table, MutableMapping):
            raise BadValue(
                f"{file} sets {section}, which is a section of settings.",
                fix="Correct it by hand: `hearthnet config edit`.",
                param=key,
            )
        plain = plain.setdefault(section, {})
    change(table, name)
    change(plain, name)
    draft = tomlkit.dumps(document)
    if _understood(draft) != _filled(wanted):
        raise BadValue(
            f"{key} cannot be changed in {file} without changing something else.",
            fix="Change it by hand: `hearthnet config edit`.",
            param=key,
        )
    return draft


def _understood(text: str) -> Mapping[str, Any] | None:
    try:
        return _filled(tomllib.loads(text))
    except tomllib.TOMLDecodeError:
        return None


def _filled(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without the sections that set nothing."""
    kept = {k: _filled(v) if isinstance(v, Mapping) else v for k, v in values.items()}
    return {key: value for key, value in kept.items() if value != {}}


def _has(values: Mapping[str, Any], key: str) -> bool:
    found: Any = values
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return False
        found = found[part]
    return True
