"""JSON Schema of a config, for editors that complete and check YAML."""

from __future__ import annotations

from typing import Any

import msgspec

from grain_sft.config.sections import CORPUS, LAYOUT, SAMPLER, SOURCE, TOP, layout_options
from grain_sft.layout import LAYOUTS
from grain_sft.options import Options, options_of, struct_of
from grain_sft.pipeline import OBSERVERS
from grain_sft.registry import Registry
from grain_sft.transforms import TRANSFORMS

_OPEN = {"type": "string", "pattern": "^[\\w.]+:\\w+$"}


def config_schema() -> dict[str, Any]:
    """Return the JSON Schema of a config. No key is required, because a config may inherit it."""
    parts: dict[str, Options] = {"corpus": CORPUS, "sampler": SAMPLER, "source": SOURCE, "config": TOP}
    parts |= {f"layout {kind}": {**LAYOUT, **layout_options(kind)} for kind in LAYOUTS}
    structs = [struct_of(name.title().replace(" ", ""), options) for name, options in parts.items()]
    _, found = msgspec.json.schema_components(structs, ref_template="#/$defs/{name}")
    for struct in structs:
        found[struct.__name__].pop("required", None)
    schema = found.pop("Config")
    for name in ("Corpus", "Source"):
        found[name]["properties"]["mixture"] |= {"type": "object", "additionalProperties": {"$ref": "#/$defs/Source"}}
        found[name]["properties"]["mixture"].pop("anyOf", None)
    for kind in LAYOUTS:
        found[f"Layout{kind.title()}"]["properties"]["kind"] = {"const": kind}
    found["LayoutOther"] = {"type": "object", "properties": {"kind": _OPEN}}
    schema["properties"] |= {
        "corpus": {"$ref": "#/$defs/Corpus"},
        "layout": {"anyOf": [{"$ref": f"#/$defs/Layout{kind.title()}"} for kind in (*LAYOUTS, "other")]},
        "sampler": {"$ref": "#/$defs/Sampler"},
        "transforms": {"type": "array", "items": _items(TRANSFORMS, found)},
        "observers": {"type": "array", "items": _items(OBSERVERS, found)},
    }
    title = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Config of grain_sft"}
    return {**schema, **title, "$defs": found}


def _items(table: Registry[Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an entry of `transforms` or `observers`: a name, or a name with its options."""
    structs = {name: struct_of(name, options_of(table[name])) for name in table}
    schemas, parts = msgspec.json.schema_components(structs.values(), ref_template="#/$defs/{name}")
    found |= parts
    mapping = {"type": "object", "properties": dict(zip(structs, schemas, strict=True)), "maxProperties": 1}
    mapping |= {"patternProperties": {":": {}}, "additionalProperties": False}
    return {"anyOf": [{"enum": list(table)}, _OPEN, mapping]}
