"""Records of `tf.train.Example`, parsed by protobuf alone. Format: tensorflow/core/example/example.proto and feature.proto."""

import functools
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

_LISTS = {"bytes_list": "TYPE_BYTES", "float_list": "TYPE_FLOAT", "int64_list": "TYPE_INT64"}


def fields_of(record: bytes) -> dict[str, Any] | None:
    """Return the features of a serialized Example, sorted by name; None where the record is not one. An empty record has none.

    A feature of one value is that value, one of several a list, and one of none is left out. Bytes are text where they are
    UTF-8.
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


@functools.cache
def _example_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="example", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (name, type) in enumerate(_LISTS.items(), 1):
        of_values = file.message_type.add(name=name)
        of_values.field.add(name="value", number=1, type=getattr(kinds, type), label=kinds.LABEL_REPEATED)
        feature.field.add(name=name, number=number, type_name=f".example.{name}", oneof_index=0, **_ONE)
    features, example = file.message_type.add(name="Features"), file.message_type.add(name="Example")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    entry.field.add(name="value", number=2, type_name=".example.Feature", **_ONE)
    entry_type = ".example.Features.FeatureEntry"
    features.field.add(
        name="feature", number=1, type=kinds.TYPE_MESSAGE, label=kinds.LABEL_REPEATED, type_name=entry_type
    )
    example.field.add(name="features", number=1, type_name=".example.Features", **_ONE)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("example.Example"))


_ONE: Any = {
    "type": descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE,
    "label": descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
}
