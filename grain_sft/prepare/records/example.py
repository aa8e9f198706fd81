"""Parsing of `tf.train.Example` records without TensorFlow.

Source of the messages: tensorflow/core/example/example.proto and feature.proto
"""

from typing import Any

from google.protobuf import message

from grain_sft.prepare.protobuf import message_class
from grain_sft.prepare.records.strict_json import decoded

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
  name: "Entry"
  field { name: "key" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
  field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".example.Feature" label: LABEL_OPTIONAL }
}
message_type {
  name: "Features" field { name: "feature" number: 1 type: TYPE_MESSAGE type_name: ".example.Entry" label: LABEL_REPEATED }
}
message_type {
  name: "Example" field { name: "features" number: 1 type: TYPE_MESSAGE type_name: ".example.Features" label: LABEL_OPTIONAL }
}
"""
"""Definitions of the messages, as a `FileDescriptorProto` in the text format of protobuf."""


def fields_of(record: bytes) -> dict[str, Any] | None:
    """Return the features of a serialized Example, sorted by name; None if `record` does not seem to be an Example.

    A feature of one value becomes a scalar, and a feature of several values a list. A feature without values is left out.
    Return {} for an empty record. Return None for other records without features: many short texts parse as one of these.
    """
    if not record:
        return {}
    try:
        features = message_class(_FILE, "example.Example").FromString(record).features.feature
    except message.DecodeError:
        return None
    if not features:
        return None
    values = {entry.key: _values(entry.value) for entry in features}
    return {name: items[0] if len(items) == 1 else items for name, items in sorted(values.items()) if items}


def _values(feature: Any) -> list[Any]:
    """Return the values of a feature. Bytes that are valid UTF-8 become strings."""
    kind = feature.WhichOneof("kind")
    values = getattr(feature, kind).value if kind else []
    return [decoded(value) if isinstance(value, bytes) else value for value in values]
