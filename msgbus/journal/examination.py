"""What the type of a value says about writing it as JSON and reading it back.

A type is examined once, by the schema that pydantic has built for it. Only what is listed here
counts as safe: a kind of field, an option or a setting that is not known is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Flag, IntEnum
from typing import Any, Final, TypeAlias, cast, final

from pydantic_core import SchemaValidator

Node: TypeAlias = Mapping[str, Any]
Config: TypeAlias = Mapping[str, Any]

DEEPEST: Final = 50
"""Levels of lists and the like that a safe type has; far fewer than can be read back."""

LONGEST: Final = 4_000
"""Digits of a number that can surely be read back; pydantic reads a few more."""

_BLOCK: Final = LONGEST // 2

_NO_KEY: Final = b'"None":'
"""How pydantic writes None as a key, without a warning."""


class Care(IntEnum):
    """How the JSON of a value is checked before it is stored."""

    NONE = 0
    """Not at all: what pydantic writes without a warning is read back equal."""

    READ = 1
    """It is read back: if that works, it is equal."""

    COMPARE = 2
    """It is read back and compared, field by field."""


@final
class TypeExamination:
    """What one type needs."""

    __slots__ = ("_bases", "_fields", "_has_numbers", "care", "datetimes", "is_fixed")

    def __init__(
        self,
        care: Care = Care.COMPARE,
        fields: int = 0,
        datetimes: Sequence[str] = (),
        bases: Sequence[type] = (),
        *,
        has_numbers: bool = False,
        is_fixed: bool = False,
    ) -> None:
        self.care = care
        """What every value needs that was not validated, or may have changed since."""
        self.is_fixed = is_fixed
        """Whether a value cannot change once it was validated."""
        self._fields = fields
        self.datetimes = tuple(datetimes)
        """Fields with a moment: only its minutes from UTC are written."""
        self._bases = tuple(bases)
        """Classes of values in it; of a value of a subclass, only their fields are written."""
        self._has_numbers = has_numbers

    def of_trusted(self, value: Any, payload: bytes) -> Care:
        """Return what a validated value needs that cannot have changed."""
        for name in self.datetimes:
            moment = value.__dict__.get(name)
            offset = None if moment is None else moment.utcoffset()
            if offset and (offset.seconds % 60 or offset.microseconds):
                return Care.COMPARE
        if len(payload) > LONGEST and self._has_numbers and _may_have_long_number(payload):
            return Care.READ
        return Care.NONE

    def of_payload(self, value: Any, payload: bytes) -> Care:
        """Return what any other value needs, which was written without a warning."""
        if self.care is Care.COMPARE or not self._is_usual(value) or _NO_KEY in payload:
            return Care.COMPARE
        # None is written without a warning, also where it is not allowed.
        if self.care is Care.READ or b"null" in payload:
            return max(Care.READ, self.of_trusted(value, payload))
        return self.of_trusted(value, payload)

    def _is_usual(self, value: Any) -> bool:
        if self._fields and len(value.__dict__) != self._fields:  # one is missing
            return False
        return not (self._bases and any(base.__subclasses__() for base in self._bases))


COMPARED: Final = TypeExamination()
"""Of a type that is not safe."""


def _may_have_long_number(payload: bytes) -> bool:
    """Look at every block: a number of twice its length fills one."""
    blocks = range(0, len(payload) - _BLOCK + 1, _BLOCK)
    return any(payload[at : at + _BLOCK].isdigit() for at in blocks)


def examine_message(schema: object) -> TypeExamination:
    """Return what messages need whose class has this core schema."""
    return _examined(schema, lambda examiner, node: examiner.message(node))


def examine(schema: object, config: Config) -> TypeExamination:
    """Return what values need whose type has this core schema, built with this core config."""
    return _examined(schema, lambda examiner, node: examiner.value(node, config))


def _examined(
    schema: object, look: Callable[[_Examiner, Node], TypeExamination]
) -> TypeExamination:
    if not isinstance(schema, dict):
        return COMPARED  # pydantic has put off building it
    try:
        return look(_Examiner(), cast("Node", schema))
    except (_UnsafeError, LookupError, RecursionError):
        return COMPARED


class _UnsafeError(Exception):
    """The type is not safe."""


_ALWAYS: Final = frozenset({"type", "ref", "metadata"})
_BOUNDS: Final = frozenset({"gt", "ge", "lt", "le", "strict"})
_LENGTHS: Final = frozenset({"min_length", "max_length", "fail_fast", "strict"})

_PLAIN: Final[Mapping[str, frozenset[str]]] = {
    "none": frozenset(),
    "bool": frozenset(),
    "str": frozenset(),
    "int": frozenset(),
    "float": frozenset(),
    "bytes": frozenset(),
    "uuid": frozenset(),
    "date": frozenset(),
    "timedelta": frozenset({"microseconds_precision"}),
    "decimal": frozenset(),
    "enum": frozenset({"cls", "members", "sub_type"}),
    "literal": frozenset({"expected"}),
    "datetime": frozenset({"microseconds_precision"}),
    "list": frozenset({"items_schema"}),
    "set": frozenset({"items_schema"}),
    "frozenset": frozenset({"items_schema"}),
    "tuple": frozenset({"items_schema", "variadic_item_index"}),
    "dict": frozenset({"keys_schema", "values_schema"}),
    "nullable": frozenset({"schema"}),
    "union": frozenset({"choices"}),
    "default": frozenset({"schema", "default", "default_factory", "default_factory_takes_data",
                          "validate_default", "copy_default"}),
    "model": frozenset({"cls", "schema", "config", "frozen", "revalidate_instances",
                        "generic_origin"}),
    "model-fields": frozenset({"fields", "model_name", "computed_fields", "from_attributes"}),
    "model-field": frozenset({"schema", "validation_alias", "serialization_alias", "frozen"}),
    "definition-ref": frozenset({"schema_ref"}),
}  # fmt: skip
"""The kinds that are known, and their options that change nothing."""

_LIMITS: Final[Mapping[str, frozenset[str]]] = {
    "bool": frozenset({"strict"}),
    "str": frozenset({"min_length", "max_length", "pattern", "regex_engine", "strict"}),
    "int": _BOUNDS | {"multiple_of"},
    "float": _BOUNDS | {"multiple_of", "allow_inf_nan"},
    "bytes": _LENGTHS,
    "uuid": frozenset({"version", "strict"}),
    "date": _BOUNDS | {"now_op", "now_utc_offset"},
    "timedelta": _BOUNDS,
    "decimal": _BOUNDS | {"multiple_of", "allow_inf_nan", "max_digits", "decimal_places"},
    "enum": frozenset({"strict"}),
    "literal": frozenset({"strict"}),
    "list": _LENGTHS,
    "set": _LENGTHS,
    "frozenset": _LENGTHS,
    "tuple": _LENGTHS,
    "dict": _LENGTHS,
    "nullable": frozenset({"strict"}),
    "model": frozenset({"strict"}),
}
"""Options by which a value is refused, and not changed: it may have passed by unvalidated."""

_READ: Final = frozenset({"decimal", "literal"})
"""Kinds whose values may be written without a warning and then be refused, if never validated:
what is no number, or none of the literals."""

_USUAL: Final[Mapping[str, Sequence[object]]] = {
    "strict": (False,),
    "on_error": ("raise",),
    "mode": ("smart",),
    "extra_behavior": ("ignore", "forbid"),
}
"""Values of options that change nothing."""

_CHANGING: Final = frozenset({"list", "set", "dict"})
"""Kinds whose values can change once validated."""

_CONFIG: Final = frozenset({
    "title", "frozen", "hide_input_in_errors", "validate_by_alias", "validate_by_name",
    "serialize_by_alias", "populate_by_name", "loc_by_alias", "from_attributes",
    "revalidate_instances", "validate_default", "validation_error_cause", "cache_strings",
    "regex_engine", "ser_json_inf_nan", "ser_json_bytes", "val_json_bytes",
    "extra_fields_behavior",
})  # fmt: skip
_CONFIG_LIMITS: Final = frozenset({"strict", "str_min_length", "str_max_length", "allow_inf_nan"})

_SHAPES: Final[Mapping[str, str]] = {
    "none": "null",
    "bool": "bool",
    "str": "string",
    "int": "int",
    "float": "float",
    "list": "array",
    "set": "array",
    "frozenset": "array",
    "tuple": "array",
    "dict": "object",
    "model": "object",
}
"""JSON of the kinds that can be told apart in a union."""

_KEYS: Final[Mapping[str, Care]] = {
    "str": Care.NONE,
    "enum": Care.NONE,
    "int": Care.READ,
    "uuid": Care.READ,
    "date": Care.READ,
}
"""Kinds that come back from the keys of an object."""


@final
class _Examiner:
    """Walks the schema of one type."""

    def __init__(self) -> None:
        self._care = Care.NONE
        self._datetimes: list[str] = []
        self._bases: set[type] = set()
        self._has_numbers = False
        self._is_fixed = True
        self._definitions: dict[str, Node] = {}
        self._met: set[str] = set()
        self._open: set[str] = set()

    def message(self, schema: Node) -> TypeExamination:
        """Look at a model whose values are of exactly this class."""
        model = self._defined(schema)
        if model["type"] != "model":
            raise _UnsafeError
        config = self._model_config(model)
        fields = self._fields(model)
        self._is_fixed = bool(model["cls"].model_config.get("frozen"))
        for name, field in fields.items():
            inner = field
            while inner["type"] in ("model-field", "default", "nullable"):
                self._check(inner)
                inner = inner["schema"]
            if inner["type"] == "datetime":
                self._check(inner)
                self._datetimes.append(name)
            else:
                self._walk(field, config, 0)
        return self._result(len(fields))

    def value(self, schema: Node, config: Config) -> TypeExamination:
        """Look at any type."""
        self._walk(self._defined(schema), config, 0)
        return self._result(0)

    def _defined(self, schema: Node) -> Node:
        """Take note of the definitions; return what uses them."""
        if schema["type"] != "definitions":
            return schema
        self._definitions = {one["ref"]: one for one in schema["definitions"]}
        inner: Node = schema["schema"]
        if inner["type"] == "definition-ref":
            self._open.add(inner["schema_ref"])
            return self._definitions[inner["schema_ref"]]
        return inner

    def _result(self, fields: int) -> TypeExamination:
        return TypeExamination(
            self._care,
            fields,
            self._datetimes,
            tuple(self._bases),
            has_numbers=self._has_numbers,
            is_fixed=self._is_fixed,
        )

    def _fields(self, model: Node) -> Mapping[str, Node]:
        self._check(model)
        inner: Node = model["schema"]
        if inner["type"] != "model-fields":
            raise _UnsafeError
        self._check(inner)
        return cast("Mapping[str, Node]", inner["fields"])

    def _model_config(self, model: Node) -> Config:
        config: Config = model.get("config", {})
        for key, value in config.items():
            if key in _CONFIG_LIMITS:
                self._need(Care.READ)
            elif key not in _CONFIG:
                raise _UnsafeError
            if key == "extra_fields_behavior" and value == "allow":
                raise _UnsafeError
        return config

    def _need(self, care: Care) -> None:
        self._care = max(self._care, care)

    def _check(self, node: Node) -> None:
        """Look at the kind of a node and its options."""
        kind = node["type"]
        plain = _PLAIN.get(kind)
        if plain is None:
            raise _UnsafeError
        for key, value in node.items():
            if key in _ALWAYS or key in plain or value is None or value in _USUAL.get(key, ()):
                continue
            if key in _LIMITS.get(kind, ()):
                self._need(Care.READ)
            elif value is not False:
                raise _UnsafeError
        if kind in _READ:
            self._need(Care.READ)
        if kind in _CHANGING or (kind == "default" and not _is_valid(node)):
            self._is_fixed = False

    def _walk(self, node: Node, config: Config | None, depth: int) -> None:
        if depth > DEEPEST:
            raise _UnsafeError
        self._check(node)
        kind = node["type"]
        if kind == "definition-ref":
            self._refer(node["schema_ref"], depth)
        elif kind == "model":
            self._bases.add(node["cls"])
            self._is_fixed = False  # it is taken as it is, and may never have been validated
            self._need(Care.READ)
            inner = self._model_config(node)
            for field in self._fields(node).values():
                self._walk(field, inner, depth + 1)
        elif kind in ("union", "nullable"):
            self._union(node, config)
        elif kind == "dict":
            self._keys(node)
        else:
            self._leaf(node, config)
        for child in _children(node):
            self._walk(child, config, depth + 1)

    def _refer(self, name: str, depth: int) -> None:
        """Look at what several fields share, or at what contains itself, once."""
        if name in self._open:
            self._need(Care.READ)  # it may be nested without end
        elif name not in self._met:
            self._met.add(name)
            self._open.add(name)
            self._walk(self._definitions[name], None, depth + 1)  # in whose config, is not known
            self._open.discard(name)

    def _leaf(self, node: Node, config: Config | None) -> None:
        kind = node["type"]
        if kind == "int":
            self._has_numbers = True
        elif kind == "float" and _infinity(config) != "strings":
            self._need(Care.READ)  # infinity is written as null
        elif kind == "datetime" or (kind == "bytes" and not _reads_bytes(config)):
            raise _UnsafeError
        elif kind == "enum":
            values = [member.value for member in node["members"]]
            if issubclass(node["cls"], Flag) or not (_all_of(values, str) or _all_of(values, int)):
                raise _UnsafeError
        elif kind == "literal" and not _all_of(node["expected"], str, int, type(None)):
            raise _UnsafeError
        elif kind in ("list", "set", "frozenset") and "items_schema" not in node:
            raise _UnsafeError  # it holds anything

    def _keys(self, node: Node) -> None:
        keys: Node = node.get("keys_schema", {"type": "any"})
        if keys["type"] == "definition-ref":
            keys = self._definitions[keys["schema_ref"]]
        if keys["type"] not in _KEYS or "values_schema" not in node:
            raise _UnsafeError
        self._need(_KEYS[keys["type"]])
        self._check(keys)
        self._leaf(keys, None)

    def _union(self, node: Node, config: Config | None) -> None:
        """Raise unless JSON shows which of the types it is."""
        choices = list(self._choices(node))
        kinds = [choice["type"] for choice in choices]
        infinity = _infinity(config)
        if "float" in kinds and (infinity != "strings" or "str" in kinds):
            raise _UnsafeError  # infinity would be read as text, or as None
        if node["type"] == "nullable" and len(kinds) == 1:
            return
        shapes = [_SHAPES.get(kind) for kind in kinds]
        if None in shapes or len(set(shapes)) < len(shapes):
            raise _UnsafeError

    def _choices(self, node: Node) -> Iterator[Node]:
        if node["type"] == "nullable":
            yield from self._choices(node["schema"])
        elif node["type"] == "union":
            for choice in _children(node):
                yield from self._choices(choice)
        elif node["type"] == "definition-ref":
            yield from self._choices(self._definitions[node["schema_ref"]])
        else:
            yield node


def _children(node: Node) -> Iterator[Node]:
    """Iterate over what a node contains, apart from the keys of an object."""
    for name in ("schema", "items_schema", "values_schema", "choices"):
        if node["type"] == "model" or name not in node:
            continue
        for child in cast(
            "list[Any]", [node[name]] if isinstance(node[name], dict) else node[name]
        ):
            yield child[0] if isinstance(child, tuple) else child


def _is_valid(default: Node) -> bool:
    """Tell whether a default, which is not validated, would be taken as a value as it is."""
    if default.get("validate_default"):
        return True
    if "default" not in default:
        return False  # made by a function
    value = default["default"]
    try:
        return bool(SchemaValidator(default["schema"]).validate_python(value) == value)
    except Exception:  # the border to user code, and definitions that are not here
        return False


def _infinity(config: Config | None) -> str:
    return "unknown" if config is None else str(config.get("ser_json_inf_nan", "null"))


def _reads_bytes(config: Config | None) -> bool:
    """Tell whether bytes are read in the way that they are written."""
    if config is None:
        return False
    return bool(config.get("ser_json_bytes", "utf8") == config.get("val_json_bytes", "utf8"))


def _all_of(values: Iterable[object], *types: type) -> bool:
    return all(type(value) in types for value in values)
