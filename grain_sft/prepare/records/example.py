"""Records of `tf.train.Example`, parsed without TensorFlow. Format: tensorflow/core/example/example.proto, feature.proto."""

import functools
from typing import Any

from google.protobuf import message

from grain_sft.prepare.protobuf import message_class

_FILE = """
name: "example.proto" package: "example" syntax: "proto3"
message_type { name: "Bytes" field { name: "value" number: 1 type: TYPE_BYTES label: LABEL_REPEATED } }
message_type { name: "Floats" field { name: "value" number: 1 type: TYPE_FLOAT label: LABEL_REPEATED } }
message_type { name: "Integers" field { name: "value" number: 1 type: TYPE_INT64 label: LABEL_REPEATED } }
message_type {
  name: "Feature"
  oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: ".example.Bytes" label: LABEL_OPTIONAL oneof_index: 0 }
  field { name: "float_list" number: 2 type: TYPE_MESSAGE type_name: ".example.Floats" label: LABEL_OPTIONAL oneof_index: 0 }
  field { name: "int64_list" number: 3 type: TYPE_MESSAGE type_name: ".example.Integers" label: LABEL_OPTIONAL oneof_index: 0 }
}
message_type {
  name: "Features"
  field { name: "feature" number: 1 type: TYPE_MESSAGE type_name: ".example.Features.FeatureEntry" label: LABEL_REPEATED }
  nested_type {
    name: "FeatureEntry"
    options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
    field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".example.Feature" label: LABEL_OPTIONAL }
  }
}
message_type {
  name: "Example"
  field { name: "features" number: 1 type: TYPE_MESSAGE type_name: ".example.Features" label: LABEL_OPTIONAL }
}
"""
_example_class = functools.cache(lambda: message_class(_FILE, "example.Example"))


def fields_of(record: bytes) -> dict[str, Any] | None:
    """Return the features of a serialized Example, sorted by name: {} for an empty record, None if the record cannot be parsed
    or has no features. Nearly any short text parses as an Example without features.

    One value becomes a scalar and several become a list; a feature without values is omitted. Bytes in UTF-8 become a string.
    """
    if not record:
        return {}
    try:
        found = _example_class().FromString(record).features.feature
    except message.DecodeError:
        return None
    return {name: value for name in sorted(found) if (value := _value(found[name])) is not None} if found else None


def _value(feature: Any) -> Any:
    kind = feature.WhichOneof("kind")
    values = (
        [_text(value) if isinstance(value, bytes) else value for value in getattr(feature, kind).value] if kind else []
    )
    return values[0] if len(values) == 1 else values or None


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value
