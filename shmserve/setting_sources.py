"""Sources of settings: reads given values, converts them, and reports errors.

The names of the settings come from `config`.
"""

import difflib
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, get_args, get_origin

import msgspec

from shmserve import bounded_files
from shmserve.errors import ConfigError
from shmserve.settings import kinds
from shmserve.settings.retired import Retired

_MOST_SHOWN = 80  # characters of a value in an error
_MOST_BYTES = 256 * 1024  # of a file
_TABLE = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(#.*)?$")
# Secrets in addresses: user and password, and the query, which may be a signature
_SECRET_PARTS = re.compile(r"(?<=://)[^/@\s'\"]*(?=@)|(?<=\?)[^\s'\"]+")
_AT_LINE = re.compile(r"\(at line (\d+), column \d+\)")  # in texts of TOML's parser
# What a broken line may show: a table's header, or a key without its value
_FIRST_KEY = re.compile(r"\[[\w. -]*\]?$|[A-Za-z_][\w.-]*(?= *[=:])")
_ADDRESS = re.compile("(port|host|address|addr|listen)$", re.IGNORECASE)  # ends of wrong names
_KEY = re.compile(r"\s*([\w.\"'-]+)\s*=")


class Declared(NamedTuple):
    """A setting as it is declared. `separator`: separates the items of a list in a text. `secret`:
    whether the value is never shown. `section`: heading of the setting in the reference."""

    name: str
    type: Any
    default: Any
    separator: str = ","
    secret: bool = False
    section: str = ""

    @property
    def wants(self) -> str:
        """Return the form of a valid value, in words."""
        return kinds.describe(self.name, self.type)

    @property
    def description(self) -> str:
        """Return the setting's description, in Markdown."""
        return kinds.description(self.type)

    def text(self, value: Any) -> str:
        """Return a value in the form of an environment variable."""
        if self.secret and value:
            return "(not shown)"
        return kinds.shown(self.name, value, self.separator)


class GivenValue(NamedTuple):
    """A value and its origin. `name`: the setting's name as the origin spells it."""

    value: Any
    origin: str
    name: str


class Sources(msgspec.Struct):
    """Values given for the settings in `_declared`: by the file, then by the environment.
    `_former`: today's names of settings, by their former names. `_retired`: settings that no longer
    exist."""

    _declared: Mapping[str, Declared]
    _former: Mapping[str, str]
    _retired: Mapping[str, Retired]
    given: dict[str, GivenValue] = {}
    problems: list[str] = []
    warnings: list[str] = []
    _gone: dict[str, GivenValue] = {}  # values given for retired settings

    def take_variables(self, environ: Mapping[str, str], prefix: str) -> None:
        """Take the variables that begin with `prefix`."""
        known = (*self._declared, *self._former, *self._retired)
        names = {f"{prefix}{name.upper()}": name for name in known}
        for variable, text in environ.items():
            if not variable.startswith(prefix):
                continue
            name = names.get(variable)
            if name is None:
                near = near_name(
                    variable, [v for v, name in names.items() if name in self._declared]
                )
                self.problems.append(f"unknown setting {variable} in the environment{near}")
                continue
            name = self._former.get(name, name)
            origin = f"{variable} in the environment"
            self._values_of(name)[name] = GivenValue(text, origin, name)

    def take_file(self, path: str, variable: str) -> None:
        """Take a TOML file, whose tables are prefixes of names. `variable`: variable that names the
        file. Raise ConfigError if the file cannot be read, or is not TOML."""
        shown = [name for name, declared in self._declared.items() if not declared.secret]
        text, document = toml_file(path, variable, shown)
        lines = _lines(text)
        for keys, value in self._leaves(document, ()):
            written = "_".join(keys)
            name = self._former.get(written, written)
            origin = f"{path}, line {lines[written].pop(0)}" if lines.get(written) else path
            given = self._values_of(name)
            if name not in self._declared and name not in self._retired:
                near = self._misplaced(keys) or near_name(name, list(self._declared), keys[:-1])
                spelled = _shortened(_spelled(keys, text))
                self.problems.append(f"unknown setting {spelled} in {origin}{near}")
            elif name in given:
                self.problems.append(f"{name} is set twice: {given[name].origin}, and {origin}")
            else:
                given[name] = GivenValue(value, origin, written)

    def _misplaced(self, keys: tuple[str, ...]) -> str:
        """Return advice if the last of a value's keys is a setting of the top level, else ""."""
        *tables, key = keys
        if not tables or key not in self._declared:
            return ""
        return (
            f": {key} belongs to no table, but stands below [{'.'.join(tables)}];"
            f" write {key} above the first line with a [table]"
        )

    def _values_of(self, name: str) -> dict[str, GivenValue]:
        return self._gone if name in self._retired else self.given

    def _judge_retired(self) -> None:
        """Warn of retired settings that describe the present behaviour, and refuse the others."""
        for name, (value, origin, _) in self._gone.items():
            retired = self._retired[name]
            reason = retired.explanation(name)
            if retired.holds(name, value):
                self.warnings.append(f"{name} ({origin}) has no effect: {reason}")
            else:
                shown = _shortened(repr(value))
                self.problems.append(f"{name} = {shown} ({origin}) is refused: {reason}")

    def _leaves(
        self, table: dict[str, Any], above: tuple[str, ...]
    ) -> Iterator[tuple[tuple[str, ...], Any]]:
        """Yield each value of a document with its keys, which make up the setting's name."""
        for key, value in table.items():
            keys = (*above, key)
            name = "_".join(keys)
            declared = self._declared.get(self._former.get(name, name))
            is_table = declared is not None and kinds.is_table(declared.type)
            if isinstance(value, dict) and not is_table:
                yield from self._leaves(value, keys)
                continue
            if isinstance(value, dict):  # keys of the top level that stand below the table
                strays = [inner for inner in value if inner in self._declared]
                yield from (((*keys, inner), value.pop(inner)) for inner in strays)
            yield keys, value

    def converted(self) -> dict[str, Any]:
        """Return the values in their settings' types. Values that do not fit become problems."""
        self._judge_retired()
        values = {}
        for name, given in self.given.items():
            declared = self._declared[name]
            try:
                value = _parsed(declared, given.value)
                values[name] = msgspec.convert(value, declared.type, strict=False)
            except (msgspec.ValidationError, ValueError):
                self.problems.append(_problem(declared, given))
        return values


def toml_file(path: str, variable: str, shown: Collection[str] = ()) -> tuple[str, dict[str, Any]]:
    """Return text and document of a TOML file. Raises as `Sources.take_file`. `shown`: settings
    whose values an error may show."""
    what = f"the file named by {variable}, {path},"
    text = ""
    try:
        text = bounded_files.read(path, _MOST_BYTES, what).decode()
        return text, tomllib.loads(text)
    except (ValueError, RecursionError) as ex:  # ValueError: also a number of too many digits
        raise ConfigError(f"{what} is not TOML: {ex}{_given_there(text, str(ex), shown)}") from ex


def _given_there(text: str, problem: str, shown: Collection[str]) -> str:
    """Return the line of a TOML text that the parser's text names, and a frequent remedy. Of
    values that may be secret, return the key alone."""
    lines = text.splitlines()
    match = _AT_LINE.search(problem)
    number = int(match[1]) if match else len(lines) if "end of document" in problem else 0
    if not 1 <= number <= len(lines):
        return ""
    line = lines[number - 1].strip()
    names = [name for name, numbers in _lines(text).items() if number in numbers]
    if not any(name in shown for name in names):
        first = _FIRST_KEY.match(line)
        if first is None:
            return ""
        line = f"{first[0]} …" if first[0] != line else line
    advice = "; texts are written in quotes" if problem.startswith("Invalid value") else ""
    return f"; line {number} is `{_shortened(line)}`{advice}"


def _parsed(declared: Declared, value: Any) -> Any:
    """Return a value with lists and tables split, and without units of sizes and times."""
    if not isinstance(value, str):
        return value
    if kinds.is_table(declared.type):
        return _table(value)
    if kinds.is_list(declared.type):
        return _items(value, declared.separator)
    return kinds.without_unit(declared.name, value)


def _items(text: str, separator: str) -> list[str]:
    return [part.strip() for part in text.split(separator) if part.strip()]


def _table(text: str) -> dict[str, list[str]]:
    """Parse 'name=item,item;other=item'. Raises ValueError if the text has another form."""
    entries = [part.partition("=") for part in text.split(";") if part.strip()]
    if any(not separator or not name.strip() for name, separator, _ in entries):
        raise ValueError
    return {name.strip(): _items(items, ",") for name, _, items in entries}


def _problem(declared: Declared, given: GivenValue) -> str:
    try:
        name, value = _culprit(declared.name, _parsed(declared, given.value), declared.type)
    except ValueError:  # a table that cannot be split
        name, value = declared.name, given.value
    shown = "(not shown)" if declared.secret else _shortened(repr(value))
    default = declared.text(declared.default) or "nothing"
    where = given.origin if given.name == declared.name else f"{given.name} in {given.origin}"
    wants = f"{declared.name} wants {declared.wants}; its default is {default}"
    return f"bad setting {_shortened(name)} = {shown} ({where}): {wants}"


def _culprit(name: str, value: Any, kind: Any) -> tuple[str, Any]:
    """Return name and value of the bad part: an entry of a table, an item of a list, or all."""
    kind = kinds.bare(kind)
    parts: Iterator[tuple[str, Any]] = iter(())
    if isinstance(value, dict) and get_origin(kind) is dict:
        parts = ((f"{name}.{key}", item) for key, item in value.items())
    elif isinstance(value, list) and get_origin(kind) is tuple:
        parts = ((f"{name}[{index}]", item) for index, item in enumerate(value))
    inner = get_args(kind)[-1 if get_origin(kind) is dict else 0] if get_args(kind) else None
    for part, item in parts:
        try:
            msgspec.convert(item, inner, strict=False)
        except msgspec.ValidationError:
            return _culprit(part, item, inner)
    return name, value


def _shortened(text: str) -> str:
    """Return a text of one printable line, without secrets in addresses."""
    if not text.isprintable():
        text = ascii(text)[1:-1]
    if "://" in text:
        text = _SECRET_PARTS.sub("…", text)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 1]}…"


def _spelled(keys: tuple[str, ...], text: str) -> str:
    """Return an unknown setting as a TOML text has it: ``[http] port``, or ``http.port``."""
    *tables, key = keys
    dotted = ".".join(keys)
    stands_dotted = re.search(rf"^\s*{re.escape(dotted)}\s*=", text, re.MULTILINE)
    return dotted if stands_dotted or not tables else f"[{'.'.join(tables)}] {key}"


def near_name(name: str, known: list[str], tables: tuple[str, ...] = ()) -> str:
    """Return a question for the known name near a wrong one, or "". `tables`: tables above the
    wrong name, below which the right one may have a shorter form."""
    stem = _ADDRESS.sub("", name)
    binds = (f"{stem}bind".lower(), f"{stem}http_bind".lower()) if stem != name else ()
    addresses = [setting for setting in known if setting.lower() in binds]
    found = addresses or difflib.get_close_matches(name, known, 1, 0.75)
    if not found:
        return ""
    meant, prefix = found[0], "".join(f"{table}_" for table in tables)
    if prefix and meant.startswith(prefix):
        meant = f"[{'.'.join(tables)}] {meant.removeprefix(prefix)} ({meant})"
    return f"; did you mean {meant}?{' It takes addresses HOST:PORT' * bool(addresses)}"


def _lines(text: str) -> dict[str, list[int]]:
    """Return the line numbers of settings in a TOML text.

    TOML's parser reports no lines, so this looks at the beginning of each line. A missed setting's
    error names the file alone.
    """
    prefix = ""
    numbers: dict[str, list[int]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if match := _TABLE.match(line):
            prefix = _name(match[1]) + "_"
            numbers.setdefault(prefix[:-1], []).append(number)
        elif match := _KEY.match(line):
            numbers.setdefault(prefix + _name(match[1]), []).append(number)
    return numbers


def _name(dotted: str) -> str:
    return "_".join(part.strip(" \"'") for part in dotted.split("."))
